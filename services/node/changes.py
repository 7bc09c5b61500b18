"""Waiting for a condition over plain state: look, wait for a change, look again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Changes:
    """Announces that something changed. Waiters re-check their own condition at each announcement."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def announce(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait_until(self, ready: Callable[[], T | None], within: float | None) -> T | None:
        """What `ready` returns once it is not None; None if that takes longer than `within` seconds.

        `within` None: the caller has a deadline of its own, which ends the wait.

        `ready` runs at once and after each announcement. What it raises is raised here.
        """
        try:
            async with asyncio.timeout(within):
                while True:
                    event = self._event
                    if (result := ready()) is not None:
                        return result
                    await event.wait()
        except TimeoutError:
            return None
