"""The promise of KV cache room, in numbers: who has how much, and that it always adds up."""

from __future__ import annotations

from meshnet.errors import KvFull
from meshnet.model import BLOCK_TOKENS, LayerRange, blocks_for
from services.node.core.work import SessionKey


class KvLedger:
    """KV room of one model on this node, in blocks of 128 tokens, layer by layer: as the memory for it is.

    Invariant (`check_integrity`): in each layer the blocks of all sessions plus the free ones are the capacity.
    """

    def __init__(self) -> None:
        self._capacity: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._blocks: dict[SessionKey, int] = {}

    def add_layers(self, layers: LayerRange, kv_tokens: int) -> None:
        """Promises room for `kv_tokens` tokens in each of these layers."""
        for layer in layers.layers:
            self._capacity[layer] = self._free[layer] = blocks_for(kv_tokens)

    def remove_layers(self, layers: LayerRange) -> None:
        """Takes the promise back. Sessions that run through these layers must have been freed."""
        for layer in layers.layers:
            self._capacity.pop(layer, None)
            self._free.pop(layer, None)

    def reserve(self, key: SessionKey, num_tokens: int) -> None:
        """Makes sure that the session has room for `num_tokens` in all. Raises KvFull and changes nothing."""
        held = self._blocks.get(key, 0)
        wanted = max(blocks_for(num_tokens), held)
        if wanted == held:
            return
        free = min(self._free.get(layer, 0) for layer in key.layers.layers)
        if wanted - held > free:
            raise KvFull(
                f"the KV cache has no room for {num_tokens} tokens of session {key.session}: "
                f"{free * BLOCK_TOKENS} tokens are free"
            )
        for layer in key.layers.layers:
            self._free[layer] -= wanted - held
        self._blocks[key] = wanted

    def release(self, key: SessionKey) -> None:
        """Gives back all that a session holds. Unknown sessions hold nothing."""
        blocks = self._blocks.pop(key, 0)
        for layer in key.layers.layers:
            if layer in self._free:
                self._free[layer] += blocks

    @property
    def free_tokens(self) -> int:
        """Tokens of a session through all layers held here that still fit."""
        return min(self._free.values(), default=0) * BLOCK_TOKENS

    @property
    def capacity_tokens(self) -> int:
        """Tokens of all sessions, each through all layers held here, that an empty cache has room for."""
        return min(self._capacity.values(), default=0) * BLOCK_TOKENS

    def check_integrity(self) -> None:
        """Raises AssertionError if a block was lost or counted twice."""
        assert self._free.keys() == self._capacity.keys()
        for layer, capacity in self._capacity.items():
            used = sum(blocks for key, blocks in self._blocks.items() if layer in key.layers)
            free = self._free[layer]
            assert free >= 0, f"{free} blocks of layer {layer} are free"
            assert used + free == capacity, f"layer {layer}: {used} used + {free} free != {capacity} in all"
