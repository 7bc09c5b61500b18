"""What of a model fits where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.inspection import LEAST_WORKSPACE_BYTES, Inspection, fit
from meshnet.model import KvPrecision, LayerRange, Quantization, WeightBytes
from services.tracker.placement import WORKSPACE_BYTES
from tests.models import LAYER, manifest

# Of the test model: 1000 bytes of weights a layer, 4 bytes of KV cache a token, 4000 bytes for the entry.
KV_TOKENS = 250
LAYER_BYTES = 1000 + 4 * 256


def inspection(workspace: int = 1, entry_workspace: int = 1) -> Inspection:
    return Inspection(manifest(), KV_TOKENS, WeightBytes(*[workspace] * 4), WeightBytes(*[entry_workspace] * 4))


@pytest.mark.parametrize("kv_precision", list(KvPrecision))
def test_json_brings_back_what_was_inspected(kv_precision: KvPrecision) -> None:
    inspected = replace(inspection(), kv_precision=kv_precision)
    assert Inspection.from_json(inspected.to_json()) == inspected


def test_what_placement_keeps_free_is_kept_free_here() -> None:
    assert LEAST_WORKSPACE_BYTES == WORKSPACE_BYTES


def test_the_entry_node_takes_fewer_layers_and_kv_comes_in_whole_blocks() -> None:
    room = LEAST_WORKSPACE_BYTES + 4000 + 3 * LAYER_BYTES
    assert fit(inspection(), Quantization.BFLOAT16, room) == (
        *(LayerRange(0, 3), LayerRange(3, 7), LayerRange(7, 11), LayerRange(11, 12)),
    )
    assert fit(inspection(), Quantization.BFLOAT16, room - 1) == (
        *(LayerRange(0, 2), LayerRange(2, 6), LayerRange(6, 10), LayerRange(10, 12)),
    )


def test_more_workspace_than_the_least_counts() -> None:
    least = LEAST_WORKSPACE_BYTES
    room = least + 4000 + LAYER_BYTES
    assert fit(inspection(entry_workspace=least), Quantization.BFLOAT16, room)
    assert fit(inspection(entry_workspace=least + 1), Quantization.BFLOAT16, room) is None
    shards = fit(inspection(workspace=least + 4000), Quantization.BFLOAT16, room)
    assert shards == tuple(LayerRange(layer, layer + 1) for layer in range(12))


def test_a_layer_that_fits_nowhere_is_none() -> None:
    heavy = replace(manifest(), layers=(*[LAYER] * 3, WeightBytes(10**6, 10**6, 10**6, 10**6)))
    room = LEAST_WORKSPACE_BYTES + 10**5
    assert fit(replace(inspection(), manifest=heavy), Quantization.BFLOAT16, room) is None
    assert fit(inspection(), Quantization.BFLOAT16, 0) is None


@given(vram_bytes=st.integers(0, 60_000), quantization=st.sampled_from(Quantization))
def test_every_shard_fits_and_would_not_with_one_layer_more(vram_bytes: int, quantization: Quantization) -> None:
    room = vram_bytes + LEAST_WORKSPACE_BYTES
    shards = fit(inspection(), quantization, room)
    if shards is None:
        assert manifest().shard_bytes(LayerRange(0, 1), quantization, 256) > vram_bytes
        return
    assert [layer for shard in shards for layer in shard.layers] == list(range(12))
    for shard in shards:
        assert manifest().shard_bytes(shard, quantization, 256) <= vram_bytes
        if shard.end < 12:
            assert manifest().shard_bytes(LayerRange(shard.start, shard.end + 1), quantization, 256) > vram_bytes
