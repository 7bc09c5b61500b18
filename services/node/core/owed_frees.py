"""Sessions that nodes could not be told to free. Pure; times are in seconds.

A node that was not reached may be back in a moment, with KV caches that nobody will ever use. Its lease would free
them, minutes later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

# By then leases have freed them.
REMEMBERED_SECONDS = 600.0
RETRY_SECONDS = 1.0
MAX_SESSIONS = 4096


class OwedFrees:
    """By node."""

    def __init__(self) -> None:
        self._sessions: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._next: dict[str, float] = {}

    def add(self, node_id: str, session: str, now: float) -> None:
        owed = self._sessions[node_id]
        owed[session] = now
        if len(owed) > MAX_SESSIONS:
            del owed[next(iter(owed))]
        self._next.setdefault(node_id, now + RETRY_SECONDS)

    def due(self, nodes: Container[str], now: float) -> tuple[str, ...]:
        """Those of the nodes here that are to be told now, and then again a little later. What is too old, or of nodes
        that have left, is forgotten."""
        for node_id, owed in tuple(self._sessions.items()):
            for session in [session for session, at in owed.items() if at < now - REMEMBERED_SECONDS]:
                del owed[session]
            if not owed:
                del self._sessions[node_id]
        due = tuple(i for i in self._sessions if i in nodes and self._next.get(i, 0.0) <= now)
        self._next = {i: now + RETRY_SECONDS if i in due else self._next.get(i, now) for i in self._sessions}
        return due

    def of(self, node_id: str) -> tuple[str, ...]:
        """Sessions that it has yet to be told of, the oldest first."""
        return tuple(self._sessions.get(node_id, ()))

    def settled(self, node_id: str, session: str) -> None:
        """It knows."""
        self._sessions.get(node_id, {}).pop(session, None)
