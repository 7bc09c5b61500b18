"""Curves of seconds by rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.estimate.curve import Curve

SECONDS = st.floats(0, 10)


def test_it_is_straight_between_points_and_goes_on_behind_them() -> None:
    curve = Curve.through([(16, 4.0), (1, 1.0), (4, 2.0)])
    assert [curve.at(rows) for rows in (0.5, 1, 2.5, 4, 10, 16, 28)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert curve.times(3).at(10) == 9.0


def test_one_point_is_a_constant() -> None:
    assert Curve(((4, 2.0),)).at(1) == Curve(((4, 2.0),)).at(100) == 2.0


def test_what_was_measured_to_take_less_with_more_takes_as_long() -> None:
    assert Curve.through([(1, 3.0), (4, 2.0), (8, 5.0)]).at(4) == 3.0


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 1000))
def test_a_roofline_is_the_larger_of_two_and_what_is_fixed(fixed: float, floor: float, each: float, rows: int) -> None:
    assert Curve.roofline(fixed, floor, each).at(rows) == pytest.approx(fixed + max(floor, rows * each), abs=1e-6)
