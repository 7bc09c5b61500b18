"""What is predicted of a node's memory is what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import TOTAL_TOLERANCE, WEIGHTS_TOLERANCE, Row, loading_peaks, measure
from benchmarks.memory_models import save_made_up
from meshnet.model import Quantization

KV_TOKENS = 2048
# More than that of one tensor and of what the C library keeps; the made-up model's third has ten times as much.
LOADING_OVERHEAD = 100 << 20


@pytest.mark.parametrize("quantization", [Quantization.BFLOAT16, Quantization.NF4])
def test_weights_and_kv_cache_are_as_predicted_and_so_is_the_total(tmp_path: Path, quantization: Quantization) -> None:
    row = measure(*save_made_up(tmp_path, "llama"), quantization, None, KV_TOKENS)
    assert abs(row.weights_error) <= WEIGHTS_TOLERANCE, row
    assert row.kv == row.kv_held
    # Resident memory, of which the C library keeps some tens of megabytes whatever the size of the shard.
    loaded = row.loaded / (row.weights_held + row.kv_held) - 1
    assert abs(loaded) <= TOTAL_TOLERANCE, row
    assert row.total_held - row.total <= max(TOTAL_TOLERANCE * row.total_held, 40 << 20), row


def test_a_load_takes_the_shard_and_little_more_of_a_model_twenty_times_as_large(tmp_path: Path) -> None:
    rows: dict[str, Row] = dict(loading_peaks(tmp_path, 20 * 10**6))
    assert rows.keys() == {f"1/{share} at {q}" for share in (20, 3) for q in ("bfloat16", "nf4")}
    for name, row in rows.items():
        assert row.loading - row.weights_held - row.kv_held <= LOADING_OVERHEAD, (name, row)
