"""What is predicted of the memory of steps, by what models are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet.model import LayerRange, LayerStep, Quantization
from services.node.core.batching import TOKEN_BUDGET
from services.node.core.workspace import largest_step, predict_workspace_bytes
from tests import models

B = Quantization.BFLOAT16
MANIFEST = replace(models.manifest(), context_length=100_000)
SMALL, WIDE = LayerStep(values=4_000, largest_linear=1 << 20), LayerStep(values=40_000, largest_linear=1 << 24)
STEPS = (SMALL,) * 8 + (WIDE,) * 2 + (SMALL,) * 2


def predicted(layers: LayerRange, quantization: Quantization = B, kv_tokens: int = 1024, **step: object) -> int:
    steps = tuple(replace(part, **step) for part in STEPS)  # type: ignore[arg-type]
    manifest = replace(MANIFEST, steps=steps)
    return predict_workspace_bytes(manifest, quantization, kv_tokens, entry=False, layers=layers)


def test_the_layer_that_takes_most_counts() -> None:
    assert predicted(LayerRange(2, 8)) == predicted(LayerRange(10, 12))
    assert predicted(LayerRange(2, 9)) == predicted(LayerRange(8, 10)) > 2 * predicted(LayerRange(2, 8))
    assert largest_step(replace(MANIFEST, steps=STEPS), LayerRange(2, 12), B, 1024) == 8


def test_quantized_layers_are_widened_and_float32_takes_twice() -> None:
    layers = LayerRange(0, 1)
    base = predicted(layers)
    assert predicted(layers, Quantization.INT8) > base
    assert predicted(layers, Quantization.NF4) > base
    assert predicted(layers, Quantization.FLOAT32) > base + 2 * TOKEN_BUDGET * SMALL.values
    # INT8 a piece at a time, however large the matrix.
    assert predicted(layers, Quantization.INT8, largest_linear=1 << 30) == predicted(
        layers, Quantization.INT8, largest_linear=1 << 24
    )


def test_scores_grow_with_the_session_to_a_bound_and_not_beyond_a_window() -> None:
    layers = LayerRange(0, 1)
    short, long = (predicted(layers, kv_tokens=tokens, score_heads=64) for tokens in (1024, 16_384))
    assert long > 2 * predicted(layers, kv_tokens=16_384)
    assert long - short < 12 * (1 << 23) * 1.3
    assert predicted(layers, kv_tokens=16_384, score_heads=64, window=128) < short


@pytest.mark.parametrize("kv_tokens", [128, 128 * 100])
def test_an_entry_node_holds_the_logits_of_all_sessions(kv_tokens: int) -> None:
    manifest = replace(MANIFEST, vocab_size=1_000_000)
    entry = predict_workspace_bytes(manifest, B, kv_tokens, entry=True)
    assert entry >= 2 * kv_tokens // 128 * manifest.vocab_size


def test_a_model_whose_files_are_elsewhere_has_a_rough_figure() -> None:
    assert predict_workspace_bytes(MANIFEST, B, 1024, entry=False) > 0
