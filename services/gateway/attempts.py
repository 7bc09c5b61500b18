"""How often, and for how long, a generation is tried at entry nodes. Pure; times are in seconds."""

from __future__ import annotations

from services.gateway.api_errors import ApiError

# Of one that has not begun.
MAX_ENTRY_NODES_TRIED = 3


class Attempts:
    """Since the last token. `tried`: entry nodes at which it failed, `error`: what the last of them said.

    `timeout`: of one that has begun, from a failure to the next token.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.tried: set[str] = set()
        self.error: ApiError | None = None
        self._failing_since: float | None = None

    def progressed(self) -> None:
        """A token is there."""
        if self._failing_since is not None:
            self.tried.clear()
            self._failing_since = None

    def failed(self, node_id: str, error: ApiError, now: float) -> None:
        self.tried.add(node_id)
        self.error = error
        self._failing_since = self._failing_since or now

    def may_go_on(self, now: float, *, has_begun: bool) -> bool:
        """Whether there is to be another attempt. `has_begun`: the client has seen some of it."""
        if has_begun:
            return self._failing_since is None or now < self._failing_since + self._timeout
        return len(self.tried) < MAX_ENTRY_NODES_TRIED
