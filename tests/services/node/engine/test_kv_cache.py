"""Sessions' keys and values in the memory of their layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import KvFull, NoRoom
from meshnet.model import BLOCK_TOKENS, LayerRange, Quantization
from services.node.core.work import ShardSpec
from services.node.engine.executor import TorchExecutor
from services.node.engine.kv_cache import KvCache
from services.node.engine.kv_pool import LayerPool
from services.node.files.manifest import read_manifest
from tests.services.node.engine.models import MODEL, TINY, save_model

LAYERS = LayerRange(3, 5)
KV_HEADS, HEAD_DIM = 2, 4
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


def make_pools(num_blocks: int) -> dict[int, LayerPool]:
    kind = (2 * KV_HEADS * HEAD_DIM, torch.float32, torch.device("cpu"))
    return {layer: LayerPool(num_blocks, *kind) for layer in LAYERS.layers}


def tokens(count: int, first: int) -> torch.Tensor:
    """K or V of `count` tokens whose values tell them apart."""
    values = torch.arange(first, first + count, dtype=torch.float32)
    return values[None, :, None].expand(KV_HEADS, count, HEAD_DIM)


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(1, 300)), max_size=12))
def test_each_cache_holds_what_was_written_last_at_each_position(steps: list[tuple[int, int, int]]) -> None:
    """Three sessions grow, are cut back and are freed when there is no room, in one memory that is small for them."""
    pools = make_pools(6)
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
            cache.write(layer, position, tokens(count, stamp), -tokens(count, stamp))
        cache.length = position + count
        wanted[index] = torch.cat([wanted[index], torch.arange(stamp, stamp + count)])
        stamp += count
    for cache, values in zip(caches, wanted, strict=True):
        cache.check_integrity()
        if cache.length:
            last = torch.tensor([stamp]).expand(KV_HEADS, 1, HEAD_DIM)
            cache.reserve(cache.length)
            cached = cache.write(LAYERS.start, cache.length - 1, last, -last)
            assert torch.equal(cached[0][0, :-1, 0], values[:-1])
            assert torch.equal(cached[1][1, :-1, -1], -values[:-1])
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


@pytest.mark.parametrize("quantization", [Quantization.BFLOAT16, Quantization.FLOAT32])
def test_a_shard_comes_with_the_memory_that_was_promised(tmp_path: Path, quantization: Quantization) -> None:
    files = save_model(tmp_path, TINY["qwen3"])
    manifest = read_manifest(files)
    spec = ShardSpec(manifest, LayerRange(1, 3), quantization, 1024)
    shard = TorchExecutor({MODEL: files}).load(spec, lambda done, total: None)
    assert shard.kv_bytes == 2 * manifest.kv_bytes(1024, quantization)


def test_a_promise_that_the_machine_cannot_keep_fails_the_load_before_anything_is_read(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["llama"])
    executor = TorchExecutor({MODEL: files})
    manifest = read_manifest(files)
    kv_tokens = 2 * executor.memory_free_bytes() // manifest.kv_bytes_per_token
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NoRoom, match="of the memory of cpu are free"):
        executor.load(ShardSpec(manifest, LayerRange(0, 1), Quantization.BFLOAT16, kv_tokens), lambda done, total: None)
