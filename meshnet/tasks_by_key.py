"""Tasks of which there is at most one at a time for each key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class TasksByKey(Generic[K]):
    """Belongs to the event loop that runs when tasks are started."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[None]] = {}

    def start(self, key: K, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Nothing happens while the one before still runs."""
        running = self._tasks.get(key)
        if running is None or running.done():
            task = self._tasks[key] = asyncio.create_task(make())
            task.add_done_callback(lambda done: self._forget(key, done))

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, key: K, done: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is done:
            del self._tasks[key]
