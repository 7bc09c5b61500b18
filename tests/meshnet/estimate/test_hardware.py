"""What a stage takes, from what its node computes with."""

from __future__ import annotations

import pytest

from meshnet.estimate.hardware import Hardware, make_head, make_stage, measured_hardware
from meshnet.model import KvPrecision, LayerRange, Quantization
from meshnet.topology import Speed
from tests.models import manifest

# 1000 bytes a layer in bfloat16: 500 weights.
MODEL = manifest(num_layers=10)
LAYERS = LayerRange(2, 6)


def test_a_step_reads_its_weights_or_multiplies_whatever_takes_longer() -> None:
    stage = make_stage(Hardware(1e6, 1e6, 0.5), MODEL, LAYERS, Quantization.BFLOAT16)
    # Four layers: 2 s fixed, 4 ms of reading, 4 ms of multiplying for each row.
    assert stage.decode.at(1) == pytest.approx(2.004)
    assert stage.chunk.at(128) == pytest.approx(2 + 128 * 0.004)
    assert stage.step_bytes == 4000
    # 4 bytes a token and layer; 4 operations for each value of 8.
    assert stage.decode_cached == pytest.approx(16e-6)
    assert stage.chunk_cached == pytest.approx(4 * 4 * 8 / 1e6)


def test_what_is_stored_smaller_is_read_faster_and_multiplied_alike() -> None:
    fast = Hardware(1e6, 1e9)
    sizes = [make_stage(fast, MODEL, LAYERS, q).decode.at(1) for q in (Quantization.NF4, Quantization.INT8)]
    assert sizes == [pytest.approx(0.0012), pytest.approx(0.00208)]
    slow = Hardware(1e9, 1e6)
    assert make_stage(slow, MODEL, LAYERS, Quantization.NF4).chunk.at(10) == pytest.approx(0.04)
    int8 = make_stage(fast, manifest(), LAYERS, Quantization.BFLOAT16, KvPrecision.INT8)
    assert int8.decode_cached == pytest.approx(8e-6)


def test_a_head_has_the_vocabulary_to_go_through() -> None:
    head = make_head(Hardware(1e6, 1e6), MODEL, Quantization.BFLOAT16)
    # 8 x 100 weights in bfloat16.
    assert head.step_bytes == 1600
    assert head.seconds.at(1) == pytest.approx(0.0016)


@pytest.mark.parametrize("quantization", Quantization)
def test_what_was_measured_is_what_would_be_measured(quantization: Quantization) -> None:
    speed = Speed("m", quantization, prefill_tokens_per_second=40_000, decode_tokens_per_second=500)
    found = measured_hardware(speed, MODEL).speed(MODEL, quantization)
    assert found.decode_tokens_per_second == pytest.approx(500)
    assert found.prefill_tokens_per_second == pytest.approx(40_000)
    assert make_stage(measured_hardware(speed, MODEL), MODEL, LAYERS, quantization).decode.at(1) == pytest.approx(0.008)
