"""Growth is the slope between logarithms; a small mesh goes through all kinds of calls."""

from __future__ import annotations

import pytest

from benchmarks.planning_time import exponent, measure


def test_the_exponent_of_a_power_is_found() -> None:
    assert exponent([10, 100, 1000], [3e-3 * n**1.5 for n in (10, 100, 1000)]) == pytest.approx(1.5)


def test_each_departure_and_join_is_timed() -> None:
    seconds = measure(8, 2, 3, 1)
    assert len(seconds["first registration"]) == 8
    assert len(seconds["departure"]) == len(seconds["join"]) == 3
    assert len(seconds["first plan"]) == 1
