"""The pause after a restart, until the nodes that hold layers are back. Pure; times are monotonic, in seconds."""

from __future__ import annotations

from collections.abc import Collection


class Settling:
    """Nothing is placed during the pause, so that nobody loads what another node is about to report.

    With `expected` nodes (those that held layers in an earlier run) the pause begins at the start, and ends when all
    of them are back. A node that brings layers and was not expected begins the pause too, or keeps it from ending
    early: where one comes from, others may. In any case it ends `seconds` after the start.
    """

    def __init__(self, now: float, seconds: float, expected: Collection[str] = ()) -> None:
        self._end = now + seconds
        self._expected = frozenset(expected)
        self._missing = set(expected)
        self._stranger_came = False
        self._until = self._end if expected else None

    def joined(self, node_id: str, *, brings_layers: bool, now: float) -> None:
        self._missing.discard(node_id)
        if now >= self._end:
            return
        if brings_layers and node_id not in self._expected:
            self._stranger_came = True
            self._until = self._end
        elif self._until is not None and not self._missing and not self._stranger_came:
            self._until = now

    def is_due(self, now: float) -> bool:
        """Whether the pause is over and no plan has been made since."""
        return self._until is not None and now >= self._until

    def pauses(self, now: float) -> bool:
        return self._until is not None and now < self._until

    def placed(self) -> bool:
        """A plan is made. Returns whether it is the first after a pause."""
        was_due, self._until = self._until is not None, None
        return was_due
