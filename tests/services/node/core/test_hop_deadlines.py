"""How long frames may take, by what those before them took."""

from __future__ import annotations

from services.node.core.hop_deadlines import (
    EQUAL_TOKENS,
    LATE_SECONDS,
    MARGIN,
    MAX_ROUTES,
    MIN_FRAMES,
    SHORTEST_SECONDS,
    HopDeadlines,
)

LONGEST = 60.0
HOPS = ("b", "c")


def after(seconds: float, num_tokens: int = 1, num_frames: int = MIN_FRAMES) -> HopDeadlines:
    deadlines = HopDeadlines()
    for _ in range(num_frames):
        deadlines.answered(HOPS, num_tokens, seconds, 0.0)
    return deadlines


def test_while_little_is_known_it_is_the_longest() -> None:
    assert after(0.1, num_frames=MIN_FRAMES - 1).seconds(HOPS, 2, 1, LONGEST, 0.0) == 2 * LONGEST
    assert after(0.1).seconds(("b", "d"), 2, 1, LONGEST, 0.0) == 2 * LONGEST


def test_fast_hops_have_the_shortest_time_each() -> None:
    assert after(0.01).seconds(HOPS, 2, 1, LONGEST, 0.0) == 2 * SHORTEST_SECONDS


def test_slow_hops_have_so_many_times_what_they_take_and_no_more_than_the_longest() -> None:
    assert after(5.0).seconds(HOPS, 2, 1, LONGEST, 0.0) == MARGIN * 5.0
    assert after(50.0).seconds(HOPS, 2, 1, LONGEST, 0.0) == 2 * LONGEST


def test_larger_frames_have_longer() -> None:
    deadlines = after(4.0, num_tokens=EQUAL_TOKENS)
    assert deadlines.seconds(HOPS, 2, 3 * EQUAL_TOKENS, LONGEST, 0.0) == MARGIN * 8.0


def test_what_was_slow_is_remembered_for_a_while() -> None:
    deadlines = after(5.0)
    deadlines.answered(HOPS, 1, 0.01, LATE_SECONDS)
    assert deadlines.seconds(HOPS, 2, 1, LONGEST, LATE_SECONDS) == MARGIN * 5.0
    deadlines.answered(HOPS, 1, 0.01, 2 * LATE_SECONDS)
    assert deadlines.seconds(HOPS, 2, 1, LONGEST, 2 * LATE_SECONDS) == 2 * SHORTEST_SECONDS


def test_routes_that_are_not_used_are_forgotten() -> None:
    deadlines = after(5.0)
    for index in range(MAX_ROUTES):
        deadlines.answered((f"n{index}",), 1, 0.1, 1.0)
    assert deadlines.seconds(HOPS, 2, 1, LONGEST, 1.0) == 2 * LONGEST
