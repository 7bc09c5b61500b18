"""Speeds: what a step tells, and how far a mean follows it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.model import LayerRange, Quantization
from meshnet.topology import Speed
from services.node.core.speeds import Pass, SpeedTable, TimedStep, time_step
from services.node.core.work import ForwardWork, FreeWork, PromptWork, SampleWork, Sampling, Segment, SessionKey, Work

LAYERS = LayerRange(4, 14)
Q = Quantization.BFLOAT16


def forward(*num_tokens: int) -> ForwardWork:
    segments = tuple(Segment(SessionKey(str(i), "m", LAYERS), 0, n, 1) for i, n in enumerate(num_tokens))
    return ForwardWork("m", LAYERS, segments, b"")


def step(kind: Pass, tokens_per_second: float) -> TimedStep:
    return TimedStep("m", LAYERS, kind, 1 / tokens_per_second)


def measured(prefill: float = 1000.0, decode: float = 100.0) -> SpeedTable:
    table = SpeedTable()
    table.set_measured(Speed("m", Q, prefill, decode))
    assert table.take_news()
    return table


@pytest.mark.parametrize(
    ("works", "kind", "seconds_per_token"),
    [
        ([forward(1)], Pass.DECODE, 0.1),
        ([forward(128)], Pass.PREFILL, 0.1 / 128),
        ([forward(128), forward(128, 128)], Pass.PREFILL, 0.1 / 384),
        ([PromptWork("m", LAYERS, forward(100).segments, (0,) * 100)], Pass.PREFILL, 0.1 / 100),
    ],
)
def test_lone_tokens_and_chunks_tell_the_speed_of_a_layer(
    works: list[Work], kind: Pass, seconds_per_token: float
) -> None:
    timed = time_step(works, seconds=1.0)
    assert timed
    assert (timed.model_id, timed.layers, timed.kind) == ("m", LAYERS, kind)
    assert timed.seconds_per_token == pytest.approx(seconds_per_token)


@pytest.mark.parametrize(
    "works",
    [
        [forward(1), forward(1)],
        [forward(1, 1, 1)],
        [forward(20)],
        [forward(128), forward(1), forward(1)],
        [forward(*[1] * 100)],
        [SampleWork("m", b"", Sampling(), 0.0)],
        [FreeWork(())],
    ],
)
def test_other_steps_tell_nothing(works: list[Work]) -> None:
    assert time_step(works, seconds=1.0) is None


def test_a_step_of_no_time_tells_nothing() -> None:
    assert time_step([forward(1)], seconds=0.0) is None


def test_a_speed_is_known_when_both_passes_are() -> None:
    table = SpeedTable()
    table.add(step(Pass.DECODE, 123.456), Q)
    assert table.speeds() == ()
    assert not table.take_news()
    table.add(step(Pass.PREFILL, 98765.0), Q)
    assert table.speeds() == (Speed("m", Q, 98800.0, 123.0),)
    assert table.take_news()
    assert not table.take_news()


def test_a_lasting_change_is_followed_and_told_once() -> None:
    table = measured(decode=100.0)
    told = 0
    for _ in range(200):
        table.add(step(Pass.DECODE, 50.0), Q)
        told += table.take_news()
    assert table.speeds()[0].decode_tokens_per_second == pytest.approx(50, rel=0.02)
    assert table.speeds()[0].prefill_tokens_per_second == 1000.0
    assert 1 <= told <= 4


@given(st.floats(1e-3, 1e9))
def test_no_single_step_is_news(tokens_per_second: float) -> None:
    table = measured(decode=100.0)
    table.add(step(Pass.DECODE, tokens_per_second), Q)
    assert not table.take_news()


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60))
def test_a_mean_stays_among_its_values(seconds: list[float]) -> None:
    table = SpeedTable()
    table.add(step(Pass.PREFILL, 1.0), Q)
    for value in seconds:
        table.add(TimedStep("m", LAYERS, Pass.DECODE, value), Q)
    rate = 1 / table.speeds()[0].decode_tokens_per_second
    assert min(seconds) * 0.99 <= rate <= max(seconds) * 1.01


def test_quantizations_and_models_are_told_apart() -> None:
    table = measured()
    table.set_measured(Speed("m", Quantization.INT8, 10.0, 1.0))
    table.set_measured(Speed("a", Q, 20.0, 2.0))
    assert table.take_news()
    table.add(step(Pass.DECODE, 90.0), Quantization.INT8)
    assert [(s.model_id, s.quantization) for s in table.speeds()] == [("a", Q), ("m", Q), ("m", Quantization.INT8)]
    assert table.speeds()[1].decode_tokens_per_second == 100.0
