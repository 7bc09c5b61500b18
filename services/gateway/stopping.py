"""Stop strings, found in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete. That string, and what follows it, is never passed on.

    If several occur, the first to be complete counts, and of those complete at the same place the longest: so the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        match = self._first_complete(text)
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[:start]
        kept = len(text) - self._num_held(text)
        self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """What was held back in vain, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
