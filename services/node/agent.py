"""Keeps this node a member of its mesh: registers, renews its lease, takes directives and the topology."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from meshnet.directive import Directive, FailureKind
from meshnet.errors import InvalidRequest, MeshnetError, TopologyGap, Unregistered
from meshnet.model import ModelManifest
from meshnet.topology import Node, Topology
from services.node.core.members import LostNode, Members
from services.node.tracker_client import Lease, TrackerClient, TrackerUnreachable

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
REPORT_ATTEMPTS = 5


class Agent:
    """`describe` returns the node as it is now. `topology` is the latest snapshot, kept when the tracker is away."""

    def __init__(self, tracker: TrackerClient, describe: Callable[[], Node], manifests: list[ModelManifest]) -> None:
        self._members = Members()
        self.registered = asyncio.Event()
        self._news = asyncio.Event()
        self._tracker = tracker
        self._describe = describe
        self._newest_plan_version = 0
        self._manifests = manifests

    @property
    def topology(self) -> Topology:
        return self._members.topology

    async def run(
        self,
        on_directive: Callable[[Directive], Awaitable[None]],
        on_topology: Callable[[], None] = lambda: None,
        on_lost: Callable[[LostNode], None] = lambda lost: None,
        on_parted: Callable[[], None] = lambda: None,
    ) -> None:
        """Stays a member for ever. `on_lost` is called for each node that is gone from the mesh, `on_parted` when the
        tracker is out of reach, or this node must register again. Raises InvalidRequest if the tracker refuses this
        node for good."""
        while True:
            lease = await self._register()
            self._members.reconnected(time.monotonic(), lease.lease_seconds)
            try:
                await _until_one_fails(
                    self._send_heartbeats(lease.heartbeat_seconds, on_lost),
                    self._watch_directives(on_directive),
                    self._watch_topology(on_topology, on_lost),
                )
            except Unregistered:
                log.warning("the tracker no longer knows this node: registering again")
            except (TrackerUnreachable, InvalidRequest, TopologyGap) as lost:
                log.warning("%s; serving goes on, registering again", lost)
            self.registered.clear()
            on_parted()
            await self._tracker.reconnect()
            await asyncio.sleep(RETRY_SECONDS)

    def announce(self) -> None:
        """What the node says of itself has changed: the next heartbeat goes out at once."""
        self._news.set()

    async def report(self, directive: Directive) -> None:
        """Brings a directive's state to the tracker. What does not get through is asked for again later."""
        if directive.failure_kind is not FailureKind.STALE_PLAN:
            self._newest_plan_version = max(self._newest_plan_version, directive.plan_version)
        for attempt in range(REPORT_ATTEMPTS):
            try:
                await self._tracker.report(directive, self._describe().shards, self._newest_plan_version)
                if directive.state.is_final:
                    self.announce()
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

    async def _register(self) -> Lease:
        said = False
        while True:
            try:
                lease = await self._tracker.register(self._describe(), self._manifests, self._newest_plan_version)
            except TrackerUnreachable as error:
                if not said:
                    log.warning("waiting for the tracker at %s: %s", self._tracker.address, error)
                    said = True
                await self._tracker.reconnect()
                await asyncio.sleep(RETRY_SECONDS)
            else:
                log.info("registered with the tracker at %s", self._tracker.address)
                for reason in lease.refused_models.values():
                    log.warning("the mesh refuses a model: %s", reason)
                self.registered.set()
                return lease

    async def _send_heartbeats(self, seconds: float, on_lost: Callable[[LostNode], None]) -> None:
        """Regularly, and at once when the node has something new to say of itself."""
        while True:
            self._news.clear()
            _tell(self._members.expire(time.monotonic()), on_lost)
            await self._tracker.heartbeat(self._describe())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()

    async def _watch_directives(self, on_directive: Callable[[Directive], Awaitable[None]]) -> None:
        async for directive in self._tracker.directives():
            await on_directive(directive)
        raise TrackerUnreachable("the tracker ended the stream of directives")

    async def _watch_topology(self, on_topology: Callable[[], None], on_lost: Callable[[LostNode], None]) -> None:
        async for topology in self._tracker.topologies():
            lost = self._members.update(topology, time.monotonic())
            on_topology()
            _tell(lost, on_lost)
        raise TrackerUnreachable("the tracker ended the stream of topologies")


def _tell(lost: tuple[LostNode, ...], on_lost: Callable[[LostNode], None]) -> None:
    for node in lost:
        log.info("node %s %s", node.node_id, node.how)
        on_lost(node)


async def _until_one_fails(*links: Coroutine[Any, Any, None]) -> None:
    """Runs all until one ends; raises what it ended in. No task group: one that fails in the moment in which it is
    cancelled forgets the cancellation (until Python 3.13), and this node would never stop."""
    tasks = [asyncio.create_task(link) for link in links]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
