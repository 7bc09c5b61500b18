"""KV caches of 8-bit integers: what they change of the output, and what they must not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet.model import KvPrecision, LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import ShardSpec
from services.node.engine import attention
from services.node.engine.executor import TorchExecutor
from services.node.engine.kv_rows import SCALE_DTYPE, KvFormat
from services.node.files.manifest import read_manifest
from tests.services.node.engine.models import MODEL, TINY, mesh, prompt_of, save_model, splits_of, steady
from tests.services.node.engine.test_parity import (
    KV_TOKENS,
    float32_shards,
    sharded_logits,
    unsharded_logits,
)

# Root mean square of what the logits are off, against their own spread. Rounding what passes from layer to layer to
# bfloat16, as every mesh does, gives 0.003 to 0.008. Gemma 3's made-up norms make its attention the most sensitive.
TOLERANCE, GEMMA3_TOLERANCE = 0.02, 0.05
# Grouped heads, a key for each head, one for all heads, sliding windows, soft-caps, sinks; keys that are large.
KINDS = ("llama", "gpt2", "falcon-multi-query", "mistral-window", "gemma2", "gemma3", "gpt_oss", "qwen3_moe")
INT8 = KvFormat(torch.int8, 2 * 3 * 8, 2 * 3)


def off(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((seen - wanted).pow(2).mean().sqrt() / wanted.std())


@pytest.fixture(scope="module", params=KINDS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save_model(tmp_path_factory.mktemp(request.param), steady(TINY[request.param]))


def test_logits_are_near_those_of_the_unsharded_model(files: ModelFiles) -> None:
    manifest, shards = read_manifest(files), float32_shards(files, (2,), KvPrecision.INT8)
    seen, wanted = torch.cat(sharded_logits(shards)), torch.cat(unsharded_logits(files))
    assert 0.001 < off(seen, wanted) < (GEMMA3_TOLERANCE if "Gemma3" in manifest.architecture else TOLERANCE)
    predicted = manifest.kv_bytes(KV_TOKENS, Quantization.FLOAT32, KvPrecision.INT8)
    assert predicted < 0.6 * manifest.kv_bytes(KV_TOKENS, Quantization.BFLOAT16)
    for shard in shards:
        assert sum(pool.allocated_bytes for pool in shard.pools.values()) == len(shard.layers) * predicted


def test_heads_may_be_attended_for_in_parts(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a session that is long makes it: here each KV head alone."""
    together = torch.cat(sharded_logits(float32_shards(files, (), KvPrecision.INT8)))
    monkeypatch.setattr(attention, "_VALUES_AT_ONCE", {"cpu": 1})
    apart = torch.cat(sharded_logits(float32_shards(files, (), KvPrecision.INT8)))
    # A value that sums in another order make another integer moves the logits by more than the sums themselves.
    assert off(apart, together) < 0.002


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral-window", "gpt_oss"])
def test_splits_and_other_sessions_change_nothing(tmp_path: Path, kind: str) -> None:
    files, prompts = save_model(tmp_path, steady(TINY[kind])), {name: prompt_of(21, i) for i, name in enumerate("abc")}
    hidden = []
    for ends in ((), (2,), (1, 3)):
        with mesh(files, splits_of(4, *ends), kv_precision=KvPrecision.INT8) as shards:
            hidden.append({name: bytes(row) for name, row in shards.step(prompts).items()})
            again = {name: bytes(row) for name, row in shards.step(prompts, dict.fromkeys(prompts, 0)).items()}
            assert again == hidden[0]
    assert hidden[0] == hidden[1] == hidden[2]


def test_a_trial_measures_what_it_would_serve(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["llama"])
    executor = TorchExecutor({MODEL: files})
    spec = ShardSpec(read_manifest(files), LayerRange(1, 3), Quantization.BFLOAT16, 512, KvPrecision.INT8)
    trial = executor.trial(executor.load(spec, lambda done, total: None))
    try:
        assert trial.prefill() > 0
        assert trial.decode() > 0
        assert trial.workspace_bytes(512)
    finally:
        trial.close()


@given(
    exponents=st.lists(st.integers(-100, 100), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_no_value_is_off_by_more_than_half_a_step(exponents: list[int], seed: int, dtype: torch.dtype) -> None:
    """A step is the scale of its token and head; tokens are rounded alone."""
    sizes = torch.exp2(torch.tensor(exponents, dtype=torch.float32))
    rows = torch.randn(3, len(exponents), 8, generator=torch.Generator().manual_seed(seed)) * sizes[:, None]
    rows = rows.to(dtype)
    stored = INT8.stored(rows, -rows)
    keys, values = stored.dequantized(torch.float32)
    assert stored.keys.dtype is torch.int8
    assert stored.key_scales is not None
    assert stored.key_scales.dtype is SCALE_DTYPE
    assert torch.equal(keys, -values)
    steps = stored.key_scales.float()
    assert bool(((keys - rows.float()).abs() <= 0.501 * steps).all())
    assert bool((steps <= 1.004 * rows.float().abs().amax(-1, keepdim=True) / 127).all())
    alone = INT8.stored(rows[:, :1], -rows[:, :1])
    assert torch.equal(alone.keys, stored.keys[:, :1])


def test_zeros_stay_zeros_and_what_is_no_number_stays_none() -> None:
    rows = torch.zeros(1, 3, 8)
    rows[0, 1, 2], rows[0, 2, 5] = float("nan"), float("inf")
    keys, _ = INT8.stored(rows, rows).dequantized(torch.float32)
    assert torch.equal(keys[0, 0], torch.zeros(8))
    assert not bool(keys[0, 1:].isfinite().any())
