"""The one thread that owns the weights. Event loops hand it work and get futures back; they never wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.node.core.batching import choose_batch
from services.node.core.work import Executor, Result, Work


@dataclass(frozen=True, slots=True)
class _Waiting:
    work: Work
    future: asyncio.Future[Any]


# Told of works that have run as one step, and of the seconds that it took.
OnStep = Callable[[Sequence[Work], float], None]


def _ignore(works: Sequence[Work], seconds: float) -> None:
    """Nobody wants to know."""


class Runner:
    """Runs an executor in a thread of its own. Make it inside the event loop that will use it.

    `on_step` is called in the event loop after each step in which nothing failed.
    """

    def __init__(self, executor: Executor, on_step: OnStep = _ignore) -> None:
        self.executor = executor
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Waiting] = deque()
        self._coming: list[_Waiting] = []
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self._thread.start()

    @property
    def queue_length(self) -> int:
        return len(self._queue) + len(self._coming)

    def submit(self, work: Work) -> asyncio.Future[Any]:
        """Queues work for a coming step. The future has its result, or the error that it ended in."""
        return self.submit_all([work])[0]

    def submit_all(self, works: Sequence[Work]) -> list[asyncio.Future[Any]]:
        """Queues works at once, so that no step begins with some of them only.

        They go to the thread when the event loop has run all that is ready now: sessions whose outputs came in one
        frame ask for tokens one after the other, and should have them of one step.
        """
        waiting = [_Waiting(work, self._loop.create_future()) for work in works]
        if not self._coming:
            self._loop.call_soon(self._hand_over)
        self._coming += waiting
        return [one.future for one in waiting]

    def _hand_over(self) -> None:
        with self._wake:
            self._queue.extend(self._coming)
            self._wake.notify()
        self._coming.clear()

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Runs a function in the thread, between two steps and before the next one."""
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._wake:
            self._calls.append((function, future))
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Ends the thread after the step that runs now, for at most a few seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while self._wait_for_work():
            self._run_calls()
            batch = self._take_batch()
            if batch:
                started = time.perf_counter()
                results = self._step([waiting.work for waiting in batch])
                self._post(self._settle_all, batch, results, time.perf_counter() - started)

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._calls or self._stopping)
            return not self._stopping

    def _take_batch(self) -> list[_Waiting]:
        with self._wake:
            chosen = set(choose_batch([waiting.work for waiting in self._queue]))
            batch = [waiting for index, waiting in enumerate(self._queue) if index in chosen]
            self._queue = deque(waiting for index, waiting in enumerate(self._queue) if index not in chosen)
        return batch

    def _step(self, works: list[Work]) -> list[Result]:
        try:
            results = self.executor.run(works)
            assert len(results) == len(works), "every work has a result"
        # Whatever a step dies of, its works get an answer and the thread lives on.
        except Exception as error:
            return [error] * len(works)
        return results

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            try:
                result, error = function(), None
            except Exception as caught:
                result, error = None, caught
            self._post(_settle, future, error or result)

    def _settle_all(self, batch: list[_Waiting], results: list[Result], seconds: float) -> None:
        for waiting, result in zip(batch, results, strict=True):
            _settle(waiting.future, result)
        if not any(isinstance(result, Exception) for result in results):
            self._on_step([waiting.work for waiting in batch], seconds)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        # The loop may be gone when the process ends; then nobody waits for the result.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.cancelled():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
