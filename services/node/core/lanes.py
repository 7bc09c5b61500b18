"""How many sessions go into the next frame of a route. Pure.

A pipeline works all the time when there is a frame for each of its stages. More and smaller ones would only make each
stage read its weights more often; fewer and larger ones would let stages wait for one another.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshnet.wire import MAX_ROWS


def rows_for_next_frame(num_ready: int, num_sessions: int, num_in_flight: int, num_stages: int) -> int:
    """Rows of the next frame, at most MAX_ROWS; 0: none leaves now.

    `num_sessions` decode on the route, of which `num_ready` wait to be sent, the others in `num_in_flight` frames.
    """
    if not num_ready or num_in_flight >= num_stages:
        return 0
    return min(num_ready, share_of_sessions(num_sessions, num_stages), MAX_ROWS)


def share_of_sessions(num_sessions: int, num_stages: int) -> int:
    """How many sessions travel together when all are busy. Rounded up: nobody waits a round because of a remainder."""
    return -(-num_sessions // num_stages)


def rows_of_equal_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of rows by their number of tokens: a frame on the wire has rows of one length."""
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(length, []).append(index)
    return list(groups.values())
