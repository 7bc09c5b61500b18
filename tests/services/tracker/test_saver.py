from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from meshnet.model import LayerRange
from services.tracker.remembered import Assignment, ForgetNode, Remembered, Save, SaveModel, SaveNode, SaveUndeployed
from services.tracker.saver import Saver
from services.tracker.store import MemoryStore, StoreFailed
from tests.services.tracker.meshes import deployed

DEADLINE = 10.0
HELD = (Assignment("m", LayerRange(0, 10)),)


class FullDisk(MemoryStore):
    """Refuses to write for a while."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals
        self.written: list[Save] = []

    def save(self, saves: Sequence[Save]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreFailed("the disk is full")
        self.written += saves
        super().save(saves)


async def test_flush_returns_when_all_is_written() -> None:
    store = MemoryStore()
    saver = Saver(store)
    saver.add([SaveModel(deployed()), SaveNode("n1", HELD)])
    await saver.flush()
    assert store.load() == Remembered({"m": deployed()}, frozenset(), {"n1": HELD})
    await saver.close()


async def test_only_the_last_word_about_a_thing_is_written() -> None:
    store = FullDisk(0)
    saver = Saver(store)
    saver.add([SaveModel(deployed()), SaveNode("n1", HELD)])
    saver.add([SaveUndeployed("m"), ForgetNode("n1")])
    await saver.flush()
    assert store.written == [SaveUndeployed("m"), ForgetNode("n1")]
    await saver.close()


async def test_what_could_not_be_written_is_said_and_tried_again() -> None:
    store = FullDisk(1)
    saver = Saver(store)
    saver.add([SaveModel(deployed())])
    with pytest.raises(StoreFailed, match="disk is full"):
        await saver.flush()
    saver.add([SaveNode("n1", HELD)])
    await saver.flush()
    assert store.load() == Remembered({"m": deployed()}, frozenset(), {"n1": HELD})
    await saver.close()


async def test_it_writes_by_itself_and_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.tracker.saver.RETRY_SECONDS", 0.01)
    store = FullDisk(2)
    saver = Saver(store)
    writing = asyncio.create_task(saver.run())
    saver.add([SaveModel(deployed())])
    async with asyncio.timeout(DEADLINE):
        while not store.written:
            await asyncio.sleep(0.01)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert store.load().models == {"m": deployed()}
    await saver.close()


async def test_closing_writes_what_waits() -> None:
    store = MemoryStore()
    saver = Saver(store)
    saver.add([SaveUndeployed("m")])
    await saver.close()
    assert store.load() == Remembered(undeployed=frozenset({"m"}))
