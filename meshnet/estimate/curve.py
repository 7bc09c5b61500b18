"""Seconds that a step takes by how much is in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

# No step has as many.
MANY_ROWS = 1e9


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by number of rows or tokens: straight between the points, constant before the first, and behind the last
    as between the last two. Points are in rising order of both."""

    points: tuple[tuple[float, float], ...]

    @staticmethod
    def through(points: Iterable[tuple[float, float]]) -> Curve:
        """Through what was measured. What takes less time with more in it was measured badly, and takes as long."""
        ordered = sorted(points)
        seconds = accumulate((seconds for _, seconds in ordered), max)
        return Curve(tuple(zip((rows for rows, _ in ordered), seconds, strict=True)))

    @staticmethod
    def roofline(fixed: float, floor: float, each: float) -> Curve:
        """`fixed` seconds, and the longer of `floor` (reading weights) and `each` for each row (multiplying)."""
        if each * MANY_ROWS <= floor:
            return Curve(((1.0, fixed + floor),))
        knee = max(floor / each, 1.0)
        return Curve(((knee, fixed + each * knee), (2 * knee, fixed + 2 * each * knee)))

    def at(self, number: float) -> float:
        points = self.points
        index = bisect_right(points, (number, float("inf")))
        if index == 0 or len(points) == 1:
            return points[0][1]
        (x0, y0), (x1, y1) = points[min(index, len(points) - 1) - 1 :][:2]
        return y0 + (y1 - y0) * (number - x0) / (x1 - x0)

    def times(self, factor: float) -> Curve:
        return Curve(tuple((number, factor * seconds) for number, seconds in self.points))
