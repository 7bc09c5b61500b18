"""Consecutive layers that are run by one call of a compiled loop."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from services.node.engine.cpu import layer, tiles
from services.node.engine.cpu.compiled import bits, layers_loop
from services.node.engine.cpu.modules import CompiledLayer
from services.node.engine.kv_pool import LayerPool
from services.node.engine.segments import Segments


def sizes_of(module: nn.Module) -> Hashable | None:
    """Of a layer that a loop can run, on this machine and with so many threads; those of equal sizes it can run one
    after the other. None: it cannot."""
    if not isinstance(module, CompiledLayer) or torch.get_num_threads() > 1:
        return None
    attention = module.self_attn
    possible = (
        all(getattr(linear, "bits", None) is not None for linear in _linears(module))
        and len(attention.norms) in (0, 2)
        and tiles.are_filled_by(attention.head_dim)
        and attention.num_heads <= layer.MAX_GROUP * attention.kv_heads
    )
    return (*_head_sizes(module), len(module.input_layernorm.bits)) if possible else None


def prepare(module: nn.Module) -> None:
    """Compiles what will run it, while it is loaded and not in its first step."""
    if sizes_of(module):
        layers_loop()


class WholeLayers:
    """Layers of equal `sizes_of`."""

    def __init__(self, modules: Sequence[CompiledLayer]) -> None:
        # They keep what lies at the addresses.
        self._modules = tuple(modules)
        self._indices = [module.self_attn.layer_idx for module in modules]
        self._windows = np.array([[module.self_attn.window or _EVERYTHING] for module in modules], np.int64)
        self._sizes = _head_sizes(modules[0])
        self._table = np.array([_addresses(module) for module in modules], np.int64)
        self._epsilons = np.array([_epsilons(module) for module in modules], np.float32)
        self._scalings = np.array([module.self_attn.scaling for module in modules], np.float32)
        self._pools: list[LayerPool] = []
        self._loop = layers_loop()

    def run(
        self, hidden: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor], segments: Segments
    ) -> torch.Tensor | None:
        """`[rows, width]` to as many. None: this step is not one for the loop.

        It takes few rows, each session's together, with keys and values as they are.
        """
        if len(hidden) > layer.MAX_ROWS or not segments.are_apart:
            return None
        if not self._find_pools(segments):
            return None
        firsts, slots = segments.slots(self._indices)
        begins = np.maximum(firsts, slots + 1 - self._windows)
        output = torch.empty_like(hidden)
        self._loop(
            bits(hidden), self._table, self._epsilons, self._scalings, self._sizes, *segments.rotation(embeddings),
            slots, begins, bits(output),
        )  # fmt: skip
        return output

    def _find_pools(self, segments: Segments) -> bool:
        """Enters where keys and values of these sessions lie. Whether they are of the kind that loops know."""
        pools = [segments[0].cache.pool(index) for index in self._indices]
        if pools == self._pools:
            return True
        if any(pool.format.scales for pool in pools):
            return False
        head_dim, _, kv_heads, _ = self._sizes
        for row, pool in zip(self._table, pools, strict=True):
            tokens = pool.rows(kv_heads, head_dim, head_dim).keys.shape[1]
            row[_KEYS : _KEYS + 3] = *(memory.ctypes.data for memory in pool.bits), tokens
        self._pools = pools
        return True


# More than any session has.
_EVERYTHING = 1 << 40
_KEYS = layer.TABLE.index("keys")


def _linears(module: CompiledLayer) -> tuple[Any, ...]:
    return module.self_attn.qkv, module.self_attn.output, module.mlp.gate_up, module.mlp.down


def _head_sizes(module: CompiledLayer) -> tuple[int, int, int, int]:
    attention = module.self_attn
    return attention.head_dim, attention.num_heads, attention.kv_heads, module.mlp.width


def _norms(module: CompiledLayer) -> list[Any]:
    return [module.input_layernorm, module.post_attention_layernorm, *module.self_attn.norms]


def _addresses(module: CompiledLayer) -> list[int]:
    linears = [where for linear in _linears(module) for where in (linear.bits.ctypes.data, _bias(linear))]
    norms = [norm.bits.ctypes.data for norm in _norms(module)]
    nowhere = [0] * (_KEYS - len(linears) - len(norms))
    return [*linears, *norms, *nowhere, 0, 0, 0, int(module.self_attn.rotates)]


def _bias(linear: Any) -> int:
    return 0 if linear.bias is None else int(linear.bias.data_ptr())


def _epsilons(module: CompiledLayer) -> list[float]:
    epsilons = [float(norm.epsilon) for norm in _norms(module)]
    return epsilons + [0.0] * (4 - len(epsilons))
