"""The shell around the mesh: carries out its effects and keeps its clock."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable

from meshnet.directive import Directive
from services.tracker.config import Config
from services.tracker.effects import Effects, Note, Settings
from services.tracker.events import EventLog, IssueTimes
from services.tracker.mesh import Mesh
from services.tracker.saver import Saver
from services.tracker.store import Store
from services.tracker.watch import Changes

log = logging.getLogger("meshnet.tracker")


class Tracker:
    """The mesh with its watchers. All on one event loop; no method of the mesh waits, so none is interrupted."""

    def __init__(self, config: Config, store: Store) -> None:
        """Begins with what the store remembers. Raises StoreFailed."""
        self.config = config
        self.saver = Saver(store)
        self.changes = Changes()
        self.events = EventLog()
        self._issues = IssueTimes()
        settings = Settings(
            lease_seconds=config.lease_seconds,
            suspect_seconds=config.suspect_after_seconds,
            auto_deploy=config.deploy,
            auto_kv_tokens=config.kv_tokens,
            auto_kv_precision=config.kv_precision,
            settle_seconds=config.settle_seconds,
        )
        # Wall time: a restarted tracker must not publish versions that watchers have already seen.
        first_version = int(time.time() * 1000)
        self.mesh = Mesh(
            settings,
            lambda: uuid.uuid4().hex,
            now=self.now(),
            first_version=first_version,
            remembered=store.load(),
        )

    def now(self) -> float:
        return time.monotonic()

    def apply(self, effects: Effects) -> Effects:
        for note in effects.notes:
            log.log(note.level, "%s", note.text)
        now = time.time()
        self.events.add(effects.notes, now)
        self._issues.add(effects.directives, now)
        self.saver.add(effects.saves)
        self.changes.notify()
        return effects

    def told(self, directives: Iterable[Directive]) -> list[Directive]:
        """Directives as people are told them: with the time of their issue."""
        return self._issues.told(directives)

    async def keep_time(self) -> None:
        """Ticks until cancelled. A tracker that was itself stopped for a while must not call its nodes lost."""
        last = self.now()
        while True:
            await asyncio.sleep(self.config.tick_seconds)
            now = self.now()
            if now - last > self.config.tick_seconds + self.config.suspect_after_seconds / 2:
                self.mesh.registry.extend_leases(now)
                text = f"the tracker was away for {now - last:.1f} s: all leases are extended"
                self.apply(Effects(notes=(Note(text, logging.WARNING),)))
            last = now
            try:
                effects = self.mesh.tick(now)
            except Exception:
                log.exception("a defect: this tick is skipped")  # The next one starts from the same state.
                continue
            if effects != Effects():
                self.apply(effects)
