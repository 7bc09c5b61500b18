"""What has happened in the mesh lately. Pure; times are of the wall clock, in seconds since 1970."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from meshnet.admin import Event, EventLevel
from meshnet.directive import Directive
from services.tracker.effects import Note

MAX_EVENTS = 1000
MAX_TEXT_CHARS = 2000
# More than the ledger keeps of finished directives, and than a large mesh has open at once.
MAX_ISSUES = 10_000


class EventLog:
    """The newest events. Their numbers begin at one with each tracker; `newest` is of the last one, 0 before it."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=max_events)
        self.newest = 0

    def add(self, notes: Iterable[Note], unix_seconds: float) -> None:
        """Notes below the level of `logging.INFO` are no events."""
        for note in notes:
            if note.level >= logging.INFO:
                self.newest += 1
                level = EventLevel.WARNING if note.level >= logging.WARNING else EventLevel.INFO
                self._events.append(Event(self.newest, unix_seconds, level, note.text[:MAX_TEXT_CHARS]))

    def after(self, number: int) -> tuple[Event, ...]:
        """Kept events with higher numbers, oldest first."""
        count = min(max(self.newest - number, 0), len(self._events))
        return tuple(reversed(tuple(itertools.islice(reversed(self._events), count))))


class IssueTimes:
    """When the newest directives were issued."""

    def __init__(self, max_issues: int = MAX_ISSUES) -> None:
        self._max_issues = max_issues
        self._issued: dict[str, float] = {}

    def add(self, directives: Iterable[Directive], unix_seconds: float) -> None:
        for directive in directives:
            self._issued[directive.directive_id] = unix_seconds
        while len(self._issued) > self._max_issues:
            del self._issued[next(iter(self._issued))]

    def told(self, directives: Iterable[Directive]) -> list[Directive]:
        """The directives with their times, where these are known."""
        return [replace(d, issued_unix_seconds=self._issued.get(d.directive_id)) for d in directives]
