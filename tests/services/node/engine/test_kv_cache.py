"""One session's keys and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet.model import LayerRange
from services.node.core.kv_ledger import BLOCK_TOKENS
from services.node.engine.kv_cache import KvCache

LAYERS = LayerRange(3, 5)
KV_HEADS, HEAD_DIM = 2, 4


def tokens(count: int, first: int) -> torch.Tensor:
    """K or V of `count` tokens whose values tell them apart."""
    values = torch.arange(first, first + count, dtype=torch.float32)
    return values[None, :, None].expand(KV_HEADS, count, HEAD_DIM)


@given(steps=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), max_size=8))
def test_a_cache_holds_what_was_written_last_at_each_position(steps: list[tuple[int, int]]) -> None:
    cache, wanted, stamp = KvCache(LAYERS), torch.empty(0), 0
    for cut, count in steps:
        position = min(cut, cache.length)
        cache.truncate(position)
        for layer in LAYERS.layers:
            keys, values = cache.write(layer, position, tokens(count, stamp), -tokens(count, stamp))
        cache.length = position + count
        wanted = torch.cat([wanted[:position], torch.arange(stamp, stamp + count)])
        stamp += count
        assert torch.equal(keys[0, :, 0], wanted)
        assert torch.equal(values[1, :, -1], -wanted)
        cache.check_integrity()
    blocks = -(-len(wanted) // BLOCK_TOKENS)
    assert cache.allocated_bytes >= blocks * BLOCK_TOKENS * 2 * len(LAYERS) * KV_HEADS * HEAD_DIM * 4


def test_memory_grows_by_blocks() -> None:
    cache = KvCache(LayerRange(0, 1))
    token_bytes = 2 * KV_HEADS * HEAD_DIM * 4
    for length, blocks in ((1, 1), (128, 1), (129, 2), (257, 3)):
        cache.write(0, cache.length, tokens(length - cache.length, 0), tokens(length - cache.length, 0))
        cache.length = length
        assert cache.allocated_bytes == blocks * BLOCK_TOKENS * token_bytes
    cache.truncate(1)
    assert cache.allocated_bytes == 3 * BLOCK_TOKENS * token_bytes


def test_integrity_notices_a_length_that_was_not_written() -> None:
    cache = KvCache(LAYERS)
    cache.write(3, 0, tokens(5, 0), tokens(5, 0))
    cache.length = 5
    with pytest.raises(AssertionError):
        cache.check_integrity()
