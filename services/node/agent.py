"""Keeps this node a member of its mesh: registers, renews its lease, takes directives and the topology."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from meshnet.directive import Directive
from meshnet.errors import InvalidRequest, MeshnetError, Unregistered
from meshnet.model import ModelManifest
from meshnet.topology import Node, Topology
from services.node.tracker_client import TrackerClient, TrackerUnreachable

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
REPORT_ATTEMPTS = 5


class Agent:
    """`describe` returns the node as it is now. `topology` is the latest snapshot, kept when the tracker is away."""

    def __init__(self, tracker: TrackerClient, describe: Callable[[], Node], manifests: list[ModelManifest]) -> None:
        self.topology = Topology()
        self.registered = asyncio.Event()
        self._tracker = tracker
        self._describe = describe
        self._manifests = manifests

    async def run(self, on_directive: Callable[[Directive], Awaitable[None]]) -> None:
        """Stays a member for ever. Raises InvalidRequest if the tracker refuses this node for good."""
        while True:
            heartbeat_seconds = await self._register()
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send_heartbeats(heartbeat_seconds))
                    group.create_task(self._watch_directives(on_directive))
                    group.create_task(self._watch_topology())
            except* Unregistered:
                log.warning("the tracker no longer knows this node: registering again")
            except* (TrackerUnreachable, InvalidRequest) as lost:
                log.warning("%s; serving goes on, registering again", lost.exceptions[0])
            self.registered.clear()
            await asyncio.sleep(RETRY_SECONDS)

    async def report(self, directive: Directive) -> None:
        """Brings a directive's state to the tracker. What does not get through is asked for again later."""
        for attempt in range(REPORT_ATTEMPTS):
            try:
                await self._tracker.report(directive, self._describe().shards)
                return
            except (Unregistered, InvalidRequest) as error:
                log.warning("report of directive %s is not wanted: %s", directive.directive_id, error)
                return
            except TrackerUnreachable as error:
                log.warning("report of directive %s: %s", directive.directive_id, error)
                await asyncio.sleep(RETRY_SECONDS * (attempt + 1))

    async def leave(self) -> None:
        if self.registered.is_set():
            try:
                await self._tracker.leave()
            except MeshnetError as error:
                log.warning("leaving: %s", error)

    async def _register(self) -> float:
        said = False
        while True:
            try:
                lease = await self._tracker.register(self._describe(), self._manifests)
            except TrackerUnreachable as error:
                if not said:
                    log.warning("waiting for the tracker at %s: %s", self._tracker.address, error)
                    said = True
                await asyncio.sleep(RETRY_SECONDS)
            else:
                log.info("registered with the tracker at %s", self._tracker.address)
                self.registered.set()
                return lease.heartbeat_seconds

    async def _send_heartbeats(self, seconds: float) -> None:
        while True:
            await self._tracker.heartbeat(self._describe())
            await asyncio.sleep(seconds)

    async def _watch_directives(self, on_directive: Callable[[Directive], Awaitable[None]]) -> None:
        async for directive in self._tracker.directives():
            await on_directive(directive)
        raise TrackerUnreachable("the tracker ended the stream of directives")

    async def _watch_topology(self) -> None:
        async for topology in self._tracker.topologies():
            self.topology = topology
        raise TrackerUnreachable("the tracker ended the stream of topologies")
