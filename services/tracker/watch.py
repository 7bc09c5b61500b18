"""Streams of what changed. Nothing is queued for a watcher: a slow one finds the newest state when it looks again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from meshnet.admin import Event
from meshnet.directive import Directive
from meshnet.topology import Topology, TopologyUpdate
from services.tracker.events import EventLog


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


async def watch_topology(changes: Changes, current: Callable[[], Topology]) -> AsyncIterator[TopologyUpdate]:
    """The whole topology now, then what has changed since the update before."""
    sent: Topology | None = None
    async for _ in changes.rounds():
        topology = current()
        if sent is None or topology.version != sent.version:
            yield topology.update_since(sent)
            sent = topology


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
