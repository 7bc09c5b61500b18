"""The keys and values of one session in the layers of one shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshnet.model import BLOCK_TOKENS, LayerRange, blocks_for
from services.node.core.regions import Region
from services.node.engine.kv_pool import LayerPool
from services.node.engine.kv_rows import KvRows


class KvCache:
    """Per layer a region of the layer's pool, of which the first `length` tokens count. Not thread-safe."""

    def __init__(self, layers: LayerRange, pools: Mapping[int, LayerPool]) -> None:
        self.layers = layers
        self.length = 0
        self._parts = {layer: (pools[layer], Region()) for layer in layers.layers}
        self._blocks_reserved = 0

    @property
    def num_blocks(self) -> int:
        """Blocks taken, in all layers together."""
        return sum(region.num_blocks for _, region in self._parts.values())

    def blocks_in(self, pool: LayerPool) -> int:
        return sum(region.num_blocks for own, region in self._parts.values() if own is pool)

    def pool(self, layer: int) -> LayerPool:
        return self._parts[layer][0]

    def first_slot(self, layer: int) -> int:
        """The token of a layer's memory at which the session begins, until a cache grows."""
        return self._parts[layer][1].start * BLOCK_TOKENS

    def truncate(self, length: int) -> None:
        """Forgets all tokens from `length` on; their memory is written over."""
        assert 0 <= length <= self.length, (length, self.length)
        self.length = length

    def reserve(self, num_tokens: int) -> None:
        """Makes room for that many tokens in all. Raises KvFull; layers before the full one may then have more."""
        wanted = blocks_for(num_tokens)
        if wanted > self._blocks_reserved:
            for pool, region in self._parts.values():
                pool.grow(region, num_tokens)
            self._blocks_reserved = wanted

    def shrink(self, num_tokens: int) -> None:
        """Gives back what is not needed for that many tokens, and forgets the others."""
        self.length = min(self.length, num_tokens)
        self._blocks_reserved = min(self._blocks_reserved, blocks_for(num_tokens))
        for pool, region in self._parts.values():
            pool.regions.shrink(region, self._blocks_reserved)

    def copy_from(self, other: KvCache, num_tokens: int) -> None:
        """Becomes the first tokens, whole blocks, of a cache of the same layers. Raises KvFull, then half done."""
        assert self.layers == other.layers
        assert num_tokens <= other.length, (num_tokens, other.length)
        self.reserve(num_tokens)
        for layer, (pool, region) in self._parts.items():
            pool.copy(other._parts[layer][1], region, num_tokens)
        self.length = num_tokens

    def release(self) -> None:
        """Gives all blocks back to the pools. The cache must not be used any more."""
        for pool, region in self._parts.values():
            pool.regions.release(region)
        self.length = self._blocks_reserved = 0

    def stored(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KvRows:
        """K and V `[kv_heads, tokens, head_dim]` of a layer, of whatever sessions, as its memory holds them."""
        pool, _ = self._parts[layer]
        return pool.format.stored(keys, values)

    def write(self, layer: int, position: int, rows: KvRows) -> KvRows:
        """Writes what `stored` has made behind the first `position` tokens of a layer, into room that was reserved.

        Returns the layer's K and V up to and with them, as views. `length` stays: a step may fail in a later layer.
        """
        pool, region = self._parts[layer]
        return pool.write(region, position, rows)

    def check_integrity(self) -> None:
        """Asserts that all layers have room for the whole length."""
        assert self.length >= 0
        for layer, (_, region) in self._parts.items():
            assert region.num_blocks * BLOCK_TOKENS >= self.length, (layer, region, self.length)
