"""Several streams as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")

# Items that wait for a slow reader; then the sources wait too.
_MAX_WAITING = 16


class _End:
    """A source has ended, with an error or without."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def merged(
    sources: Sequence[AsyncGenerator[T, None]], silence: float | None = None
) -> AsyncGenerator[T | None, None]:
    """All items of all sources, which run at once; None whenever nothing has come for `silence` seconds.

    The first error of a source is raised, after what came before it, and ends the others. So does closing.
    """
    queue: asyncio.Queue[T | _End] = asyncio.Queue(_MAX_WAITING)
    tasks = [asyncio.create_task(_forward(source, queue)) for source in sources]
    num_running = len(tasks)
    try:
        while num_running:
            try:
                async with asyncio.timeout(silence):
                    item = await queue.get()
            except TimeoutError:
                yield None
                continue
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(source: AsyncGenerator[T, None], queue: asyncio.Queue[T | _End]) -> None:
    error: Exception | None = None
    try:
        async with contextlib.aclosing(source):
            async for item in source:
                await queue.put(item)
    except Exception as raised:
        error = raised
    await queue.put(_End(error))
