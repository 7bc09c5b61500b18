"""The keys and values of one session in the layers of one shard."""

from __future__ import annotations

import torch

from meshnet.model import LayerRange
from services.node.core.kv_ledger import BLOCK_TOKENS, blocks_for


class KvCache:
    """Per layer, K and V `[kv_heads, capacity, head_dim]`, of which the first `length` tokens count.

    A layer's memory is allocated when it is first written. Not thread-safe.
    """

    def __init__(self, layers: LayerRange) -> None:
        self.layers = layers
        self.length = 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in (self._keys, self._values) for tensor in tensors.values())

    def truncate(self, length: int) -> None:
        """Forgets all tokens from `length` on; their memory is written over."""
        assert 0 <= length <= self.length, (length, self.length)
        self.length = length

    def write(
        self, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes K and V `[kv_heads, tokens, head_dim]` behind the first `position` tokens of a layer.

        Returns the layer's K and V up to and with them, as views. `length` stays: a step may fail in a later layer.
        """
        end = position + keys.shape[1]
        return self._write(self._keys, layer, position, end, keys), self._write(
            self._values, layer, position, end, values
        )

    @staticmethod
    def _write(
        tensors: dict[int, torch.Tensor], layer: int, position: int, end: int, new: torch.Tensor
    ) -> torch.Tensor:
        tensor = tensors.get(layer)
        if tensor is None or tensor.shape[1] < end:
            capacity = blocks_for(end) * BLOCK_TOKENS
            grown = new.new_empty(new.shape[0], capacity, new.shape[2])
            if tensor is not None:
                grown[:, :position] = tensor[:, :position]
            tensors[layer] = tensor = grown
        tensor[:, position:end] = new
        return tensor[:, :end]

    def check_integrity(self) -> None:
        """Asserts that all written layers hold the whole length, in whole blocks."""
        assert self.length >= 0
        assert self._keys.keys() == self._values.keys()
        for layer, keys in self._keys.items():
            values = self._values[layer]
            assert layer in self.layers, (layer, self.layers)
            assert keys.shape[:2] == values.shape[:2], (keys.shape, values.shape)
            assert keys.shape[1] >= self.length, (keys.shape, self.length)
            assert keys.shape[1] % BLOCK_TOKENS == 0, keys.shape
        assert self.length == 0 or len(self._keys) == len(self.layers)
