"""How long frames may take on the rest of a route, by how long those before them took. Pure; times are in seconds.

A hop that is mute is found by asking it (see `services.node.peers`). This is for one that talks and does not work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

# So many times what the slowest frame of late took, for its size.
MARGIN = 10.0
SHORTEST_SECONDS = 10.0
# A frame of one token takes about as long as one of so many: weights are read once for all.
EQUAL_TOKENS = 16
LATE_SECONDS = 60.0
MIN_FRAMES = 8
MAX_ROUTES = 256


@dataclass(slots=True)
class _Seen:
    """The most seconds a token in the time before this one, and in this one, which `began` then."""

    began: float
    before: float = 0.0
    slowest: float = 0.0
    num_frames: int = 0


class HopDeadlines:
    """Of frames that one node sends, by the hops that they pass."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, _Seen] = OrderedDict()

    def answered(self, hops: Hashable, num_tokens: int, seconds: float, now: float) -> None:
        """A frame of so many tokens came back."""
        seen = self._at(hops, now)
        seen.slowest = max(seen.slowest, seconds / (EQUAL_TOKENS + num_tokens))
        seen.num_frames += 1

    def seconds(self, hops: Hashable, num_hops: int, num_tokens: int, longest: float, now: float) -> float:
        """For a frame of so many tokens. `longest`: for each hop, at most; and all that is said while little is
        known."""
        seen = self._at(hops, now)
        if seen.num_frames < MIN_FRAMES:
            return longest * num_hops
        slowest = max(seen.before, seen.slowest) * (EQUAL_TOKENS + num_tokens)
        return min(max(MARGIN * slowest, SHORTEST_SECONDS * num_hops), longest * num_hops)

    def _at(self, hops: Hashable, now: float) -> _Seen:
        seen = self._seen.get(hops)
        if seen is None:
            seen = self._seen[hops] = _Seen(now)
            if len(self._seen) > MAX_ROUTES:
                self._seen.popitem(last=False)
        if now >= seen.began + LATE_SECONDS:
            # Of a time in which nothing came, what was before it is all that is known.
            seen.before, seen.slowest, seen.began = seen.slowest or seen.before, 0.0, now
        self._seen.move_to_end(hops)
        return seen
