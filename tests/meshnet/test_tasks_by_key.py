"""At most one task at a time for each key."""

from __future__ import annotations

import asyncio

from meshnet.tasks_by_key import TasksByKey


async def test_a_key_has_one_task_at_a_time_and_the_next_after_it() -> None:
    tasks, begun, ends = TasksByKey[str](), list[str](), asyncio.Event()

    async def work(name: str) -> None:
        begun.append(name)
        await ends.wait()

    for name in ("first", "not while that runs"):
        tasks.start("a", lambda name=name: work(name))  # type: ignore[misc]
    tasks.start("b", lambda: work("beside it"))
    await asyncio.sleep(0)
    assert begun == ["first", "beside it"]
    ends.set()
    while asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.sleep(0)
    tasks.start("a", lambda: work("then"))
    await asyncio.sleep(0)
    assert begun[-1] == "then"


async def test_cancelled_ones_end() -> None:
    tasks, ended = TasksByKey[str](), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks.start("a", work)
    await asyncio.sleep(0)
    tasks.cancel()
    async with asyncio.timeout(5):
        await ended.wait()
