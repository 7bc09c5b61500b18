"""Measures the ways to the tracker and to other nodes, one at a time and seldom."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from meshnet.errors import MeshnetError
from meshnet.topology import Link, Topology
from services.node.core.links import TRACKER, LinkTable, Measurement
from services.node.peers import Peers
from services.node.tracker_client import TrackerClient

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
NUM_ROUND_TRIPS = 4


class LinkProber:
    """`topology` gives the latest snapshot, `queue_length` the frames that wait on this node; `on_new` is called when
    `links` has a link more."""

    def __init__(
        self,
        node_id: str,
        tracker: TrackerClient,
        peers: Peers,
        topology: Callable[[], Topology],
        queue_length: Callable[[], int],
        on_new: Callable[[], None],
    ) -> None:
        self._table = LinkTable(node_id)
        self._node_id = node_id
        self._tracker = tracker
        self._peers = peers
        self._topology = topology
        self._queue_length = queue_length
        self._on_new = on_new

    def links(self) -> tuple[Link, ...]:
        return self._table.links()

    def bytes_per_second(self, node_id: str) -> float | None:
        """Of the way to a node, if it has been measured."""
        return self._table.bytes_per_second(node_id)

    async def run(self) -> None:
        """Measures for ever, once this node is a member."""
        while True:
            topology, now = self._topology(), time.monotonic()
            if self._node_id in topology.nodes:
                measurement = self._table.next(topology, self._peers.used(), now, busy=self._queue_length() > 0)
                if measurement:
                    await self._measure(measurement)
            await asyncio.sleep(LOOK_SECONDS)

    async def _measure(self, measurement: Measurement) -> None:
        started = time.monotonic()
        try:
            rtt = min([await self._seconds(measurement.node_id, 0) for _ in range(NUM_ROUND_TRIPS)])
            size = measurement.payload_bytes
            payload = await self._seconds(measurement.node_id, size) if size else None
        except MeshnetError as error:
            log.debug("the link to %s is not measured: %s", measurement.node_id or "the tracker", error)
            now = time.monotonic()
            self._table.failed(measurement, now - started, now)
        else:
            now = time.monotonic()
            if self._table.measured(measurement, rtt, payload, now - started, now):
                self._on_new()

    async def _seconds(self, node_id: str, num_bytes: int) -> float:
        """From the first byte that leaves to the answer."""
        sending: Awaitable[None]
        started = time.perf_counter()
        sending = self._tracker.ping(num_bytes) if node_id == TRACKER else self._peers.echo(node_id, num_bytes)
        await sending
        return time.perf_counter() - started
