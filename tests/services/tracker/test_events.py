"""The newest events, and the streams of those who watch them."""

from __future__ import annotations

import asyncio
import logging

import pytest

from meshnet.admin import EventLevel
from meshnet.directive import Directive, DirectiveKind
from meshnet.model import LayerRange
from services.tracker.effects import Note
from services.tracker.events import MAX_TEXT_CHARS, EventLog, IssueTimes
from services.tracker.watch import Changes, watch_events

DEADLINE = 10.0


def happened(events: EventLog, *texts: str) -> None:
    events.add([Note(text) for text in texts], 1.5)


def numbers(events: EventLog, after: int) -> list[int]:
    return [event.number for event in events.after(after)]


def test_events_are_numbered_and_dated() -> None:
    events = EventLog()
    assert (events.newest, events.after(0)) == (0, ())
    events.add([Note("joined"), Note("lost", logging.WARNING), Note("broken", logging.ERROR)], 100.0)
    events.add([Note("a detail", logging.DEBUG), Note("back")], 200.0)
    assert [(e.number, e.unix_seconds, e.level, e.text) for e in events.after(0)] == [
        (1, 100.0, EventLevel.INFO, "joined"),
        (2, 100.0, EventLevel.WARNING, "lost"),
        (3, 100.0, EventLevel.WARNING, "broken"),
        (4, 200.0, EventLevel.INFO, "back"),
    ]
    assert numbers(events, 2) == [3, 4]
    assert numbers(events, 4) == numbers(events, 99) == []


def test_only_the_newest_are_kept_and_none_without_bound() -> None:
    events = EventLog(max_events=3)
    happened(events, *"abcde")
    assert numbers(events, 0) == [3, 4, 5]
    happened(events, "x" * (MAX_TEXT_CHARS + 1))
    assert len(events.after(5)[0].text) == MAX_TEXT_CHARS


def test_directives_are_told_with_the_time_of_their_issue() -> None:
    first, second, other = (
        Directive(name, "n", DirectiveKind.LOAD_SHARD, "m", LayerRange(0, 1), 1, "test") for name in "abc"
    )
    times = IssueTimes(max_issues=2)
    times.add([first], 10.0)
    times.add([second], 20.0)
    assert [d.issued_unix_seconds for d in times.told([first, second, other])] == [10.0, 20.0, None]
    times.add([other], 30.0)
    assert [d.issued_unix_seconds for d in times.told([first, second, other])] == [None, 20.0, 30.0]


async def test_watchers_get_the_past_and_then_what_happens() -> None:
    changes, events = Changes(), EventLog()
    happened(events, "a", "b", "c")
    stream = watch_events(changes, events, past=2)
    async with asyncio.timeout(DEADLINE):
        assert [(await anext(stream)).text for _ in range(2)] == ["b", "c"]
        waiting = asyncio.ensure_future(anext(stream))
        changes.notify()  # Nothing has happened: nothing is sent.
        happened(events, "d")
        changes.notify()
        assert (await waiting).text == "d"
        waiting = asyncio.ensure_future(anext(stream))
        changes.close()
        with pytest.raises(StopAsyncIteration):
            await waiting


@pytest.mark.parametrize(("past", "texts"), [(0, []), (2, ["b", "c"]), (100, ["a", "b", "c"])])
async def test_the_past_alone_ends_by_itself(past: int, texts: list[str]) -> None:
    events = EventLog()
    happened(events, "a", "b", "c")
    stream = watch_events(Changes(), events, past, past_only=True)
    async with asyncio.timeout(DEADLINE):
        assert [event.text async for event in stream] == texts


async def test_a_watcher_that_is_too_slow_finds_a_gap_in_the_numbers() -> None:
    changes, events = Changes(), EventLog(max_events=3)
    happened(events, "a", "b")
    stream = watch_events(changes, events, past=10)
    async with asyncio.timeout(DEADLINE):
        assert (await anext(stream)).number == 1
        happened(events, *"cdefgh")
        changes.notify()
        # What was kept when it looked is still its own; after that only the newest are there.
        assert [(await anext(stream)).number for _ in range(4)] == [2, 6, 7, 8]
