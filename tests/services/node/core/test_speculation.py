"""Drafts are as long as pays: by what was accepted, and by what steps took."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.core.choices import Choice
from services.node.core.speculation import (
    LAST_PAUSE,
    MAX_ROW_TOKENS,
    MAX_STEP_TOKENS,
    PROBE_TOKENS,
    SIZES,
    DraftCounts,
    Drafts,
    FixedLimit,
    MeasuredLimit,
    StepCost,
)

Seconds = Callable[[int], float]


def slow_link(tokens: int) -> float:
    """The way costs, not the rows."""
    return 0.16 + 0.0005 * tokens


def cpu(tokens: int) -> float:
    """Sixteen rows cost half as much again as one."""
    return 0.030 + 0.001 * tokens


def compute_bound(tokens: int) -> float:
    return 0.010 * tokens


def run(
    seconds: Seconds, share: float, *, chances: int = 400, num_rows: int = 1, seed: int = 0
) -> tuple[list[int], MeasuredLimit, StepCost]:
    """The drafts of a session of whose drafted tokens such a share is right, one after the other."""
    limit, cost, draw = MeasuredLimit(), StepCost(), random.Random(seed)
    drafted = []
    for _ in range(chances):
        size = limit.choose(cost, num_rows)
        right = next((index for index in range(size) if draw.random() >= share), size)
        if size:
            limit.learn(size, right)
        cost.add(num_rows * (1 + size), seconds(num_rows * (1 + size)) * draw.uniform(0.9, 1.2))
        drafted.append(size)
    return drafted, limit, cost


@pytest.mark.parametrize("seconds", [slow_link, cpu, compute_bound])
def test_nothing_accepted_leads_to_nothing_drafted(seconds: Seconds) -> None:
    drafted, _, _ = run(seconds, share=0.0)
    late = drafted[50:]
    assert late.count(PROBE_TOKENS) > 0, "it is tried again"
    assert sum(map(bool, late)) < 16, "ever more seldom"


@pytest.mark.parametrize("seconds", [slow_link, cpu])
def test_all_accepted_keeps_drafts_long(seconds: Seconds) -> None:
    drafted, _, _ = run(seconds, share=1.0)
    assert set(drafted[20:]) == {MAX_ROW_TOKENS - 1}


def test_where_each_row_costs_a_step_nothing_is_drafted_however_right_it_is() -> None:
    drafted, _, _ = run(compute_bound, share=0.8)
    assert sum(map(bool, drafted[50:])) < 0.15 * len(drafted[50:])


def test_a_slow_link_pays_for_guesses_that_a_machine_would_not() -> None:
    far, _, _ = run(slow_link, share=0.4)
    near, _, _ = run(lambda tokens: 0.010 + 0.005 * tokens, share=0.4)
    assert sum(far[50:]) > 3 * sum(near[50:])


def test_drafts_shrink_when_many_share_a_step() -> None:
    sums = [sum(run(cpu, share=0.7, num_rows=rows)[0][50:]) for rows in (1, 4, 8, 40)]
    assert sums == sorted(sums, reverse=True)
    assert sums[0] > 2 * sums[2]
    assert sums[3] == 0, "no draft is so short that so many would fit"


def test_it_begins_again_when_the_text_repeats_itself_again() -> None:
    _, limit, cost = run(cpu, share=0.0)
    chances = 0
    while limit.choose(cost, 1) == 0:
        chances += 1
        assert chances <= LAST_PAUSE
    for _ in range(5):
        limit.learn(PROBE_TOKENS, PROBE_TOKENS)
    assert limit.choose(cost, 1) in SIZES[2:]


@given(st.floats(0, 1), st.integers(1, 100), st.integers(0, 1000), st.sampled_from([slow_link, cpu, compute_bound]))
def test_limits_are_kept(share: float, num_rows: int, seed: int, seconds: Seconds) -> None:
    drafted, _, _ = run(seconds, share, chances=40, num_rows=num_rows, seed=seed)
    assert set(drafted) <= set(SIZES)
    assert all(not size or num_rows * (1 + size) <= MAX_STEP_TOKENS for size in drafted)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 10)), min_size=1, max_size=80))
def test_no_step_is_thought_to_take_no_time(steps: list[tuple[int, float]]) -> None:
    cost = StepCost()
    assert cost.seconds(1) == 0
    for tokens, seconds in steps:
        cost.add(tokens, seconds)
        assert 0 < cost.seconds(1) <= cost.seconds(16) <= cost.seconds(64)


def test_a_line_is_learnt_and_forgotten() -> None:
    cost = StepCost()
    for _ in range(10):
        for tokens in (1, 4, 16):
            cost.add(tokens, cpu(tokens))
    assert cost.seconds(8) == pytest.approx(cpu(8), rel=0.05)
    for _ in range(10):
        for tokens in (1, 4, 16):
            cost.add(tokens, slow_link(tokens))
    assert cost.seconds(8) == pytest.approx(slow_link(8), rel=0.2)


def test_drafts_are_never_longer_than_there_is_room_for() -> None:
    drafts = Drafts([1, 2, 3, 1, 2], FixedLimit(7))
    assert drafts.next(3, StepCost(), 1) == (3, 1, 2)
    assert drafts.next(0, StepCost(), 1) == drafts.next(-1, StepCost(), 1) == ()
    drawn: list[Choice | BaseException] = [Choice(3), Choice(1), Choice(9), ValueError("behind a draft that was wrong")]
    assert drafts.settle((3, 1, 2), drawn) == drawn[:3]
    assert drafts.counts == DraftCounts(1, 3, 2)
    for token in (3, 1, 9):
        drafts.emitted(token)
    assert drafts.next(3, StepCost(), 1) == ()
