"""Pipelines made up for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from meshnet.estimate.curve import Curve
from meshnet.estimate.hardware import HeadCosts, StageCosts
from meshnet.estimate.pipeline import FrameCosts, Pipeline, Stage, Way

SECONDS = st.floats(0, 1)
FREE = FrameCosts()
NO_LINK = Way()


def stage(floor: float, each: float = 0.0, *, name: str = "n", machine: str = "", cached: float = 0.0) -> Stage:
    step = Curve.roofline(0.0, floor, each)
    return Stage(name, machine or name, StageCosts(step, step, cached, cached, floor * 1e9, cached * 1e9))


def pipeline(
    *floors: float,
    each: float = 0.0,
    head: float = 0.0,
    way: Way = NO_LINK,
    frames: FrameCosts = FREE,
    machine: str = "",
    cached: float = 0.0,
) -> Pipeline:
    """A stage for each number, which is its seconds of reading; `each`: for each row or token in all of them."""
    stages = tuple(stage(floor, each, name=f"n{i}", machine=machine, cached=cached) for i, floor in enumerate(floors))
    behind = len(stages) - 1
    return Pipeline(stages, HeadCosts(Curve(((1, head),)), 0.0), 1024, (way,) * behind, way if behind else None, frames)


PIPELINES = st.builds(
    lambda floors, each, head, delay, rate, hop, cached: pipeline(
        *floors, each=each, head=head, way=Way(delay, rate), frames=FrameCosts(hop, hop, hop, 0.0), cached=cached
    ),
    st.lists(st.floats(1e-3, 1), min_size=1, max_size=5),
    st.floats(0, 0.1),
    SECONDS,
    SECONDS,
    st.none() | st.floats(1e4, 1e9),
    st.floats(0, 0.01),
    st.floats(0, 1e-4),
)
