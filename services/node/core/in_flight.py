"""The sessions that begin at this node, as load on the nodes of their routes. Pure: times are in seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshnet.routing import Route

# By then the heartbeats of the hops have told of a session, and the topology has come back.
UNSEEN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Session:
    route: Route
    began_at: float


class InFlight:
    """Sessions by id."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def begin(self, session: str, route: Route, now: float) -> None:
        self._sessions[session] = _Session(route, now)

    def end(self, session: str) -> None:
        """Unknown ones are no error."""
        self._sessions.pop(session, None)

    def unseen(self, now: float) -> Counter[str]:
        """How many sessions each node has from here that the topology does not show yet."""
        return Counter(
            node_id
            for session in self._sessions.values()
            if now - session.began_at < UNSEEN_SECONDS
            for node_id in {hop.node_id for hop in session.route}
        )
