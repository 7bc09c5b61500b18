"""When layers that compute nonsense are given up."""

from __future__ import annotations

from services.node.core.broken import GIVE_UP_SESSIONS, REMEMBERED_SECONDS, BrokenSteps


def test_several_sessions_give_layers_up_and_one_does_not() -> None:
    steps = BrokenSteps()
    assert not any(steps.add("m", "same", float(now)) for now in range(10))
    outcomes = [steps.add("m", f"s{index}", 10.0) for index in range(GIVE_UP_SESSIONS - 1)]
    assert outcomes == [False] * (GIVE_UP_SESSIONS - 2) + [True]
    assert not steps.add("m", "another", 11.0), "counted anew"


def test_models_are_counted_each_on_its_own() -> None:
    steps = BrokenSteps()
    assert not any(steps.add(f"m{index}", f"s{index}", 0.0) for index in range(2 * GIVE_UP_SESSIONS))


def test_what_was_long_ago_does_not_count() -> None:
    steps = BrokenSteps()
    assert not any(
        steps.add("m", f"s{index}", index * (REMEMBERED_SECONDS / (GIVE_UP_SESSIONS - 1) + 1.0)) for index in range(20)
    )
