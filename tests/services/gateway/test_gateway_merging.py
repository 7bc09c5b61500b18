from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from services.gateway.merging import merged

DEADLINE = 10


class Source:
    """Yields what it is given, when it is given it."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.num_taken = 0
        self.closed = asyncio.Event()

    def give(self, *items: int | Exception | None) -> None:
        """An exception fails the source, and None ends it."""
        for item in items:
            self._items.put_nowait(item)

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self._items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                self.num_taken += 1
                yield item
        finally:
            self.closed.set()


async def test_items_come_as_they_come_and_the_end_with_the_last_source() -> None:
    a, b = Source(), Source()
    got = []
    async with asyncio.timeout(DEADLINE), contextlib.aclosing(merged([a.stream(), b.stream()])) as items:
        for source, item in ((a, 1), (b, 2), (b, 3), (a, 4)):
            source.give(item)
            got.append(await anext(items))
        a.give(None)
        b.give(5, None)
        got += [item async for item in items]
    assert got == [1, 2, 3, 4, 5]


async def test_no_sources_are_no_items() -> None:
    assert [item async for item in merged([])] == []


async def test_an_error_comes_after_what_was_before_it_and_ends_the_others() -> None:
    a, b = Source(), Source()
    a.give(1, ValueError("gone"))
    items = merged([a.stream(), b.stream()])
    async with asyncio.timeout(DEADLINE):
        assert await anext(items) == 1
        with pytest.raises(ValueError, match="gone"):
            await anext(items)
    assert b.closed.is_set()


async def test_closing_ends_all_sources() -> None:
    sources = [Source() for _ in range(3)]
    sources[0].give(1)
    async with asyncio.timeout(DEADLINE):
        items = merged([source.stream() for source in sources])
        assert await anext(items) == 1
        await items.aclose()
    assert all(source.closed.is_set() for source in sources)


async def test_cancellation_ends_all_sources() -> None:
    a, b = Source(), Source()
    items = merged([a.stream(), b.stream()])
    waiting = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert a.closed.is_set()
    assert b.closed.is_set()


async def test_silence_is_none_and_loses_nothing() -> None:
    source = Source()
    async with asyncio.timeout(DEADLINE), contextlib.aclosing(merged([source.stream()], silence=0.01)) as items:
        assert await anext(items) is None
        assert await anext(items) is None
        source.give(*range(100), None)
        assert [item async for item in items if item is not None] == list(range(100))


async def test_a_slow_reader_holds_the_sources_up() -> None:
    source = Source()
    source.give(*range(1000), None)
    async with asyncio.timeout(DEADLINE), contextlib.aclosing(merged([source.stream()])) as items:
        assert await anext(items) == 0
        for _ in range(100):
            await asyncio.sleep(0)
        assert source.num_taken < 50
        assert len([item async for item in items]) == 999
