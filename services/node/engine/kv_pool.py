"""The keys and values of all sessions in one layer, in memory that is taken when the layer is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshnet.errors import NoRoom
from meshnet.model import BLOCK_TOKENS, LayerRange, ModelManifest, Quantization, blocks_for
from meshnet.sizes import format_size
from services.node.core.regions import Move, Region, Regions
from services.node.engine.device import free_bytes, is_out_of_memory
from services.node.engine.precision import compute_dtype


class LayerPool:
    """Room for `num_blocks` blocks of 128 tokens, of which each session has a contiguous region. Not thread-safe.

    `values_per_token`: of K and V together. How they are divided is known when the first are written.
    """

    def __init__(self, num_blocks: int, values_per_token: int, dtype: torch.dtype, device: torch.device) -> None:
        self.regions = Regions(num_blocks)
        self._values_per_token = values_per_token
        # Written to, so that the system really gives the memory now and not in the middle of a step.
        self._memory = torch.empty(num_blocks * BLOCK_TOKENS * values_per_token, dtype=dtype, device=device).zero_()
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    @property
    def allocated_bytes(self) -> int:
        return self._memory.nbytes

    def empty_like(self, num_blocks: int) -> LayerPool:
        """A pool of another size for the same layer."""
        return LayerPool(num_blocks, self._values_per_token, self._memory.dtype, self._memory.device)

    def grow(self, region: Region, num_tokens: int) -> None:
        """Makes room for that many tokens in all. Raises KvFull, and then has changed nothing."""
        for move in self.regions.grow(region, blocks_for(num_tokens)):
            for tensor in (self._keys, self._values):
                if tensor is not None:
                    _move(tensor, move)

    def write(
        self, region: Region, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes K and V `[kv_heads, tokens, head_dim]` behind the first `position` tokens of a region.

        Returns K and V up to and with them, as views, which hold until a region grows.
        """
        if self._keys is None or self._values is None:
            self._keys, self._values = self._divide(keys, values)
        first = region.start * BLOCK_TOKENS
        begin = first + position
        end = begin + keys.shape[1]
        assert end <= first + region.num_blocks * BLOCK_TOKENS, (end, region)
        self._keys[:, begin:end] = keys
        self._values[:, begin:end] = values
        return self._keys[:, first:end], self._values[:, first:end]

    def _divide(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.regions.num_blocks * BLOCK_TOKENS
        (key_heads, _, key_dim), (value_heads, _, value_dim) = keys.shape, values.shape
        parts = torch.split(self._memory, [tokens * key_heads * key_dim, tokens * value_heads * value_dim])
        return parts[0].view(key_heads, tokens, key_dim), parts[1].view(value_heads, tokens, value_dim)


def allocate_pools(
    manifest: ModelManifest,
    layers: LayerRange,
    quantization: Quantization,
    kv_tokens: int,
    device: torch.device,
    half: torch.dtype = torch.bfloat16,
) -> Mapping[int, LayerPool]:
    """Room for `kv_tokens` tokens in each of these layers. Raises NoRoom, before it takes what is not there."""
    dtype, num_blocks = compute_dtype(quantization, half), blocks_for(kv_tokens)
    needed = len(layers) * manifest.kv_bytes(num_blocks * BLOCK_TOKENS, quantization)
    free = free_bytes(device)
    if needed > free:
        raise NoRoom(
            f"the KV cache of {kv_tokens} tokens in layers {layers} needs {format_size(needed)}, "
            f"{format_size(free)} of the memory of {device} are free"
        )
    values_per_token = manifest.kv_bytes_per_token // torch.bfloat16.itemsize
    try:
        return {layer: LayerPool(num_blocks, values_per_token, dtype, device) for layer in layers.layers}
    except Exception as error:
        if is_out_of_memory(error):
            raise NoRoom(f"out of memory while allocating {format_size(needed)} of KV cache") from error
        raise


def _move(tensor: torch.Tensor, move: Move) -> None:
    """Block by block where source and target overlap, in the order that reads each block before it is written over."""
    apart = abs(move.target - move.source) >= move.num_blocks
    step = move.num_blocks if apart else 1
    blocks = range(0, move.num_blocks, step)
    for block in blocks if move.target < move.source else reversed(blocks):
        source, target, size = (part * BLOCK_TOKENS for part in (move.source + block, move.target + block, step))
        tensor[:, target : target + size] = tensor[:, source : source + size]
