"""When layers that compute nonsense are given up. Pure; times are in seconds.

One session alone may have run into what a dtype cannot hold. Where several do, it is the weights or the machine.
"""

from __future__ import annotations

from collections import defaultdict

GIVE_UP_SESSIONS = 3
REMEMBERED_SECONDS = 120.0


class BrokenSteps:
    """Of one node: the sessions for which its layers computed what is not finite, though their input was."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, dict[str, float]] = defaultdict(dict)

    def add(self, model_id: str, session: str, now: float) -> bool:
        """Returns whether the model's layers here are to be given up."""
        seen = self._seen[model_id]
        seen[session] = now
        for other in [other for other, at in seen.items() if at < now - REMEMBERED_SECONDS]:
            del seen[other]
        if len(seen) < GIVE_UP_SESSIONS:
            return False
        del self._seen[model_id]
        return True
