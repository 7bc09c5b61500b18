"""Streams of what changed. Nothing is queued for a watcher: a slow one finds the newest state when it looks again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

from meshnet.admin import Event
from meshnet.directive import Directive
from meshnet.topology import Topology, TopologyUpdate
from services.tracker.events import EventLog

T = TypeVar("T")


class Changes:
    """Wakes all watchers at each change, and ends them when closed."""

    def __init__(self) -> None:
        self._count = 0
        self._closed = False
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._count += 1
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def rounds(self) -> AsyncIterator[None]:
        """One round at once, then one after each change, or after several at a stroke; ends when closed."""
        while not self._closed:
            seen = self._count
            yield
            while self._count == seen and not self._closed:
                await self._changed.wait()

    def _wake(self) -> None:
        # Those who wait hold the old event; those who come later wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


async def watch_topology(
    changes: Changes, current: Callable[[], Topology]
) -> AsyncIterator[tuple[Topology | None, Topology]]:
    """What was seen before and the topology as it is now: first nothing before, then a pair for each change."""
    seen: Topology | None = None
    async for _ in changes.rounds():
        topology = current()
        if seen is None or topology.version != seen.version:
            yield seen, topology
            seen = topology


class Updates(Generic[T]):
    """Updates between snapshots, made once for all watchers that have seen the same one; the newest few are kept."""

    def __init__(self, make: Callable[[TopologyUpdate], T], keep: int = 16) -> None:
        self._make = make
        self._keep = keep
        self._made: dict[tuple[int | None, int], T] = {}

    def between(self, seen: Topology | None, topology: Topology) -> T:
        key = (seen.version if seen else None, topology.version)
        if key not in self._made:
            self._made[key] = self._make(topology.update_since(seen))
            if len(self._made) > self._keep:
                del self._made[next(iter(self._made))]
        return self._made[key]


async def watch_events(
    changes: Changes, events: EventLog, past: int, *, past_only: bool = False
) -> AsyncIterator[Event]:
    """The newest `past` events that are kept, then each new one. A watcher that is slow misses those that are not kept
    any longer: their numbers are missing."""
    seen = max(events.newest - past, 0)
    async for _ in changes.rounds():
        for event in events.after(seen):
            seen = event.number
            yield event
        if past_only:
            return


async def watch_directives(
    changes: Changes, open_directives: Callable[[], Iterable[Directive]]
) -> AsyncIterator[Directive]:
    """Each open directive of a node once, in the order of issue. Errors of `open_directives` end the stream."""
    sent: set[str] = set()
    async for _ in changes.rounds():
        directives = tuple(open_directives())
        new = [directive for directive in directives if directive.directive_id not in sent]
        sent = {directive.directive_id for directive in directives}
        for directive in new:
            yield directive
