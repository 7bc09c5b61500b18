"""What is predicted of a node's memory is what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loading_peak import SHARES, loading_peaks
from benchmarks.memory import TOTAL_TOLERANCE, WEIGHTS_TOLERANCE, measure
from benchmarks.memory_models import save_made_up
from meshnet.model import Quantization

KV_TOKENS = 2048
# That of the largest tensor, widened, and of what the C library keeps until it is told; the made-up model's third has
# five to twenty times as much.
LOADING_OVERHEAD = 48 << 20


@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        ("llama", Quantization.BFLOAT16),
        ("llama", Quantization.INT8),
        ("mixtral", Quantization.BFLOAT16),
    ],
)
def test_weights_kv_cache_and_the_total_are_as_predicted(
    tmp_path: Path, model: str, quantization: Quantization
) -> None:
    row = measure(*save_made_up(tmp_path, model), quantization, None, KV_TOKENS)
    assert abs(row.weights_error) <= WEIGHTS_TOLERANCE, row
    assert row.kv == row.kv_held
    # Resident memory.
    assert abs(row.total_error) <= TOTAL_TOLERANCE, row
    assert abs(row.loaded / (row.weights_held + row.kv_held) - 1) <= WEIGHTS_TOLERANCE, row


@pytest.mark.slow
def test_a_load_takes_the_shard_and_little_more_of_a_model_that_is_much_larger(tmp_path: Path) -> None:
    rows = dict(loading_peaks(tmp_path, 20 * 10**6))
    assert len(rows) == len(SHARES)
    for name, row in rows.items():
        assert row.loading_overhead <= LOADING_OVERHEAD, (name, row)
