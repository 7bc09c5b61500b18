"""Brings changes of the state to the store, beside the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from services.tracker.remembered import Save, subject
from services.tracker.store import Store, StoreFailed

log = logging.getLogger("meshnet.tracker")

RETRY_SECONDS = 1.0


class Saver:
    """Changes wait here until they are written; of two about the same thing only the later one is kept.

    What could not be written stays and is tried again, so a full disk costs no change that matters still.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[tuple[str, str], Save] = {}
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        # One thread: it keeps the order of writes even if one who waits for them is cancelled.
        self._thread = ThreadPoolExecutor(1, "meshnet-state")

    def add(self, saves: Iterable[Save]) -> None:
        for save in saves:
            self._waiting[subject(save)] = save
            self._news.set()

    async def flush(self) -> None:
        """Returns once all changes so far are written. Raises StoreFailed."""
        async with self._turn:
            batch = dict(self._waiting)
            if not batch:
                return
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.save, tuple(batch.values()))
            for key, save in batch.items():
                if self._waiting.get(key) is save:
                    del self._waiting[key]

    async def run(self) -> None:
        """Writes changes as they come, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self.flush()
            except StoreFailed as error:
                log.error("%s; trying again", error)  # noqa: TRY400 (the reason is known)
                self._news.set()
                await asyncio.sleep(RETRY_SECONDS)

    async def close(self) -> None:
        """Writes what waits, once."""
        try:
            await self.flush()
        except StoreFailed as error:
            log.error("%s; %d changes are lost", error, len(self._waiting))  # noqa: TRY400
        self._thread.shutdown()
