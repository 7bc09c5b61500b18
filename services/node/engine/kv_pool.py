"""The keys and values of all sessions in one layer, in memory that is taken when the layer is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from meshnet.errors import NoRoom
from meshnet.model import BLOCK_TOKENS, KvPrecision, LayerRange, ModelManifest, Quantization, blocks_for
from meshnet.sizes import format_size
from services.node.core.regions import Move, Region, Regions
from services.node.engine import huge_pages
from services.node.engine.cpu.compiled import Bits, bits
from services.node.engine.device import free_bytes, is_out_of_memory
from services.node.engine.kv_rows import SCALE_DTYPE, KvFormat, KvRows, kv_format


class LayerPool:
    """Room for `num_blocks` blocks of 128 tokens, of which each session has a contiguous region. Not thread-safe.

    How it is divided between K and V is known when the first are written.
    """

    def __init__(self, num_blocks: int, kv: KvFormat, device: torch.device) -> None:
        self.regions = Regions(num_blocks)
        self.format = kv
        tokens = num_blocks * BLOCK_TOKENS
        # Written to, so that the system really gives the memory now and not in the middle of a step.
        self._memory = torch.empty(tokens * kv.values, dtype=kv.dtype, device=device)
        huge_pages.use_when_touched(self._memory)
        self._memory.zero_()
        self._scales = torch.empty(tokens * kv.scales, dtype=SCALE_DTYPE, device=device).zero_()
        self._rows: KvRows | None = None
        self._bits: tuple[Bits, Bits] | None = None

    @property
    def allocated_bytes(self) -> int:
        return self._memory.nbytes + self._scales.nbytes

    def empty_like(self, num_blocks: int) -> LayerPool:
        """A pool of another size for the same layer."""
        return LayerPool(num_blocks, self.format, self._memory.device)

    def grow(self, region: Region, num_tokens: int) -> None:
        """Makes room for that many tokens in all. Raises KvFull, and then has changed nothing."""
        for move in self.regions.grow(region, blocks_for(num_tokens)):
            for tensor in self._rows.tensors if self._rows else ():
                _move(tensor, move)

    def rows(self, kv_heads: int, key_dim: int, value_dim: int) -> KvRows:
        """All of the memory as K and V `[kv_heads, tokens, ..]`, where they are stored as they are."""
        if self._rows is None:
            self._rows = self._divide(KvRows(*(self._memory.new_empty(kv_heads, 0, d) for d in (key_dim, value_dim))))
        return self._rows

    @property
    def bits(self) -> tuple[Bits, Bits]:
        """The memory of K and V in bfloat16 on the CPU, as compiled loops take it, once it has been divided."""
        if self._bits is None:
            assert self._rows is not None
            self._bits = bits(self._rows.keys), bits(self._rows.values)
        return self._bits

    def copy(self, source: Region, target: Region, num_tokens: int) -> None:
        """Copies the first tokens of a region into another one, which has room for them."""
        size = blocks_for(num_tokens)
        assert size <= min(source.num_blocks, target.num_blocks), (source, target, num_tokens)
        for tensor in self._rows.tensors if self._rows else ():
            _move(tensor, Move(source.start, target.start, size))

    def write(self, region: Region, position: int, rows: KvRows) -> KvRows:
        """Writes what `format` has made of K and V behind the first `position` tokens of a region.

        Returns K and V up to and with them, as views, which hold until a region grows.
        """
        if self._rows is None:
            self._rows = self._divide(rows)
        first = region.start * BLOCK_TOKENS
        begin = first + position
        end = begin + rows.keys.shape[1]
        assert end <= first + region.num_blocks * BLOCK_TOKENS, (end, region)
        for held, new in zip(self._rows.tensors, rows.tensors, strict=True):
            held[:, begin:end] = new
        return self._rows.of(slice(first, end))

    def _divide(self, rows: KvRows) -> KvRows:
        values, scales = rows.tensors[:2], rows.tensors[2:]
        return KvRows(*self._split(self._memory, values), *self._split(self._scales, scales))

    def _split(self, memory: torch.Tensor, like: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """All of the memory, as tensors `[kv_heads, tokens, ...]` of all tokens."""
        tokens = self.regions.num_blocks * BLOCK_TOKENS
        shapes = [(tensor.shape[0], tokens, tensor.shape[2]) for tensor in like]
        parts = torch.split(memory, [heads * tokens * width for heads, _, width in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def allocate_pools(
    manifest: ModelManifest,
    layers: LayerRange,
    quantization: Quantization,
    kv_tokens: int,
    device: torch.device,
    precision: KvPrecision = KvPrecision.BFLOAT16,
    half: torch.dtype = torch.bfloat16,
) -> Mapping[int, LayerPool]:
    """Room for `kv_tokens` tokens in each of these layers. Raises NoRoom, before it takes what is not there."""
    num_blocks = blocks_for(kv_tokens)
    needed = len(layers) * manifest.kv_bytes(num_blocks * BLOCK_TOKENS, quantization, precision)
    free = free_bytes(device)
    if needed > free:
        raise NoRoom(
            f"the KV cache of {kv_tokens} tokens in layers {layers} needs {format_size(needed)}, "
            f"{format_size(free)} of the memory of {device} are free"
        )
    kv = kv_format(manifest, quantization, precision, half)
    try:
        return {layer: LayerPool(num_blocks, kv, device) for layer in layers.layers}
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
