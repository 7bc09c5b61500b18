"""What benchmarks.estimate_error makes of measurements."""

from __future__ import annotations

import pytest

from benchmarks.estimate_error.calibration import (
    COMMANDS,
    TOGETHER,
    Calibration,
    frames_of,
    hardware_of,
    machine_of,
    median_calibration,
    num_cores,
    spec_of,
)
from benchmarks.estimate_error.meshes import SESSIONS, Bare, steady_rate
from benchmarks.streams import Stream
from meshnet.chunks import CHUNK_TOKENS
from meshnet.estimate.pipeline import FrameCosts, frame_seconds, tokens_per_second
from meshnet.estimate.spec import parse_nodes
from tests.meshnet.estimate.pipelines import pipeline
from tests.models import manifest

MODEL = manifest(num_layers=10)
FOUND = Calibration(dict.fromkeys(COMMANDS, 0.1), dict.fromkeys(TOGETHER, 0.2))


def bare(frames: FrameCosts, num_nodes: int) -> Bare:
    """What stubs would show that take just this."""
    route = pipeline(*[0.0] * num_nodes, frames=frames)
    many = 1 / tokens_per_second([route], {}, SESSIONS, 0).tokens_per_second
    return Bare(frame_seconds(route, 1, 0), many, many + frames.aside)


def test_frames_are_told_from_stubs() -> None:
    frames = FrameCosts(step=0.001, row=0.0002, hop=0.0007, aside=0.0001)
    found = frames_of({count: bare(frames, count) for count in (1, 2, 4)})
    for name in ("step", "row", "hop", "aside"):
        assert getattr(found, name) == pytest.approx(getattr(frames, name)), name
    assert frames_of({1: bare(frames, 1)}).hop == 0


def test_steps_alone_and_at_once_are_a_machine() -> None:
    hardware = hardware_of(FOUND, MODEL)
    # Ten layers of 1000 bytes, 500 weights each.
    assert hardware.bytes_per_second == pytest.approx(10_000 / 0.1)
    assert hardware.flops_per_second == pytest.approx(2 * 5000 * CHUNK_TOKENS / 0.1)
    assert hardware.measured is not None
    assert hardware.measured.decode.times(10).at(16) == pytest.approx(0.1)
    machine = machine_of(FOUND, MODEL)
    # At once all take twice as long.
    assert machine.cores == pytest.approx(num_cores() / 2)
    assert machine.bytes_per_second == pytest.approx(num_cores() * 10_000 / 0.2)


def test_it_is_said_as_a_spec() -> None:
    big = Calibration(dict.fromkeys(COMMANDS, 1e-06), dict.fromkeys(TOGETHER, 2e-06))
    (node,) = parse_nodes([spec_of(big, MODEL)])
    assert node.hardware.bytes_per_second == pytest.approx(hardware_of(big, MODEL).bytes_per_second)
    assert node.shared.cores == pytest.approx(num_cores() / 2)


def test_several_rounds_are_their_medians() -> None:
    slow = Calibration(dict.fromkeys(COMMANDS, 9.0), dict.fromkeys(TOGETHER, 0.1))
    found = median_calibration([FOUND, slow, FOUND])
    assert set(found.alone.values()) == {0.1}
    assert set(found.together.values()) == {0.2}


def test_only_what_all_streams_decode_together_counts() -> None:
    # One begins at 2 s, the other ends at 6 s: four events of it between, and two of the one.
    early, late = Stream(9, 0.0, (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0)), Stream(5, 2.0, (2.0, 2.0, 2.0, 2.0))
    assert steady_rate([early, late]) == pytest.approx((6 + 2) / 4)
    # Two tokens an event.
    assert steady_rate([Stream(9, 0.0, (1.0,) * 4)]) == pytest.approx(2.0)
