"""Sessions' keys and values in the memory of their layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import KvFull, NoRoom
from meshnet.model import BLOCK_TOKENS, KvPrecision, LayerRange, Quantization
from services.node.core.work import ShardSpec
from services.node.engine.executor import TorchExecutor
from services.node.engine.kv_cache import KvCache
from services.node.engine.kv_pool import LayerPool
from services.node.engine.kv_rows import KvFormat
from services.node.files.manifest import read_manifest
from tests.services.node.engine.models import MODEL, TINY, save_model

LAYERS = LayerRange(3, 5)
KV_HEADS, HEAD_DIM = 2, 4
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


FORMATS = {
    "float32": KvFormat(torch.float32, 2 * KV_HEADS * HEAD_DIM),
    "int8": KvFormat(torch.int8, 2 * KV_HEADS * HEAD_DIM, 2 * KV_HEADS),
}


def make_pools(num_blocks: int, kind: str = "float32") -> dict[int, LayerPool]:
    return {layer: LayerPool(num_blocks, FORMATS[kind], torch.device("cpu")) for layer in LAYERS.layers}


def tokens(stamps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tokens whose values tell them apart, also when they are rounded."""
    digits = torch.stack([stamps % 127, stamps // 127, *[torch.full_like(stamps, 127)] * (HEAD_DIM - 2)], dim=-1)
    values = digits.float() * torch.tensor([[[1.0]], [[-3.0]]])
    return values, -values


@pytest.mark.parametrize("kind", list(FORMATS))
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(1, 300)), max_size=12))
def test_each_cache_holds_what_was_written_last_at_each_position(kind: str, steps: list[tuple[int, int, int]]) -> None:
    """Three sessions grow, are cut back and are freed when there is no room, in one memory that is small for them."""
    pools = make_pools(6, kind)
    caches = [KvCache(LAYERS, pools) for _ in range(3)]
    wanted, stamp = [torch.empty(0)] * 3, 0
    for index, cut, count in steps:
        cache, position = caches[index], min(cut, caches[index].length)
        cache.truncate(position)
        wanted[index] = wanted[index][:position]
        try:
            cache.reserve(position + count)
        except KvFull:
            cache.release()
            wanted[index] = torch.empty(0)
            continue
        for layer in LAYERS.layers:
            cache.write(layer, position, cache.stored(layer, *tokens(torch.arange(stamp, stamp + count))))
        cache.length = position + count
        wanted[index] = torch.cat([wanted[index], torch.arange(stamp, stamp + count)])
        stamp += count
    for cache, values in zip(caches, wanted, strict=True):
        cache.check_integrity()
        if cache.length:
            cache.reserve(cache.length)
            last = cache.stored(LAYERS.start, *tokens(torch.tensor([stamp])))
            cached = cache.write(LAYERS.start, cache.length - 1, last)
            # Bit for bit what all tokens together are stored as, wherever and however often they were written.
            whole = FORMATS[kind].stored(*tokens(torch.cat([values[:-1], torch.tensor([stamp])])))
            for held, wished in zip(cached.tensors, whole.tensors, strict=True):
                assert torch.equal(held, wished)
    for pool in pools.values():
        pool.regions.check_integrity()
        assert sum(cache.blocks_in(pool) for cache in caches) + pool.regions.num_free == 6


def test_memory_is_taken_at_once_and_given_out_by_blocks() -> None:
    pools = make_pools(4)
    assert [pool.allocated_bytes for pool in pools.values()] == [4 * BLOCK_TOKENS * TOKEN_BYTES] * 2
    cache = KvCache(LAYERS, pools)
    for length, blocks in ((1, 1), (128, 1), (129, 2), (257, 3), (1, 3)):
        cache.reserve(length)
        assert cache.num_blocks == len(LAYERS) * blocks
    cache.release()
    assert all(pool.regions.num_free == 4 for pool in pools.values())


def test_integrity_notices_a_length_without_room() -> None:
    cache = KvCache(LAYERS, make_pools(4))
    cache.reserve(5)
    cache.length = BLOCK_TOKENS + 1
    with pytest.raises(AssertionError):
        cache.check_integrity()


@pytest.mark.parametrize("kv_precision", list(KvPrecision))
@pytest.mark.parametrize("quantization", [Quantization.BFLOAT16, Quantization.FLOAT32])
def test_a_shard_comes_with_the_memory_that_was_promised(
    tmp_path: Path, quantization: Quantization, kv_precision: KvPrecision
) -> None:
    files = save_model(tmp_path, TINY["qwen3"])
    manifest = read_manifest(files)
    spec = ShardSpec(manifest, LayerRange(1, 3), quantization, 1024, kv_precision)
    shard = TorchExecutor({MODEL: files}).load(spec, lambda done, total: None)
    # Two layers; K and V of two heads of 32 values, each head with a scale of two bytes.
    sizes = {KvPrecision.BFLOAT16: 128 * (4 if quantization is Quantization.FLOAT32 else 2), KvPrecision.INT8: 128 + 8}
    assert shard.kv_bytes == spec.kv_bytes == 2 * 1024 * sizes[kv_precision]


def test_a_promise_that_the_machine_cannot_keep_fails_the_load_before_anything_is_read(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["llama"])
    executor = TorchExecutor({MODEL: files})
    manifest = read_manifest(files)
    kv_tokens = 2 * executor.memory_free_bytes() // manifest.kv_bytes_per_token
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NoRoom, match="of the memory of cpu are free"):
        executor.load(ShardSpec(manifest, LayerRange(0, 1), Quantization.BFLOAT16, kv_tokens), lambda done, total: None)
