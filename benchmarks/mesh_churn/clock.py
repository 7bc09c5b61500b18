"""Virtual time: calls in the order of their times, and of their making where these are equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """`now` in seconds from the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        assert time >= self.now, "nothing happens in the past"
        heapq.heappush(self._heap, (time, next(self._ids), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def every(self, seconds: float, call: Callable[[], None]) -> None:
        def again() -> None:
            call()
            self.after(seconds, again)

        self.after(seconds, again)

    def run_until(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = end
