"""The promise of KV cache room, in numbers: who has how much, and that it always adds up."""

from __future__ import annotations

from meshnet.errors import KvFull
from meshnet.model import LayerRange
from services.node.core.work import SessionKey

# What the ledger counts in and a cache grows by. Steps of fixed size waste the least; copying a cache once in so many
# tokens costs little beside attention, which reads all of it for each.
BLOCK_TOKENS = 128


def blocks_for(num_tokens: int) -> int:
    """Blocks of 128 tokens that hold this many."""
    return -(-num_tokens // BLOCK_TOKENS)


class KvLedger:
    """KV room of one model on this node, counted in layer-blocks: one block of 128 tokens in one layer.

    Invariant (`check_integrity`): the layer-blocks of all sessions plus the free ones are the capacity.
    """

    def __init__(self) -> None:
        self._capacity: dict[int, int] = {}
        self._blocks: dict[SessionKey, int] = {}
        self._free = 0

    def add_layers(self, layers: LayerRange, kv_tokens: int) -> None:
        """Promises room for `kv_tokens` tokens in each of these layers."""
        for layer in layers.layers:
            self._capacity[layer] = blocks_for(kv_tokens)
            self._free += self._capacity[layer]

    def remove_layers(self, layers: LayerRange) -> None:
        """Takes the promise back. Sessions that run through these layers must have been freed."""
        for layer in layers.layers:
            self._free -= self._capacity.pop(layer, 0)

    def reserve(self, key: SessionKey, num_tokens: int) -> None:
        """Makes sure that the session has room for `num_tokens` in all. Raises KvFull and changes nothing."""
        held = self._blocks.get(key, 0)
        wanted = max(blocks_for(num_tokens), held)
        cost = (wanted - held) * len(key.layers)
        if cost > self._free:
            raise KvFull(
                f"the KV cache has no room for {num_tokens} tokens of session {key.session}: "
                f"{self.free_tokens} tokens are free"
            )
        self._free -= cost
        self._blocks[key] = wanted

    def fits_ever(self, layers: LayerRange, num_tokens: int) -> bool:
        """Whether an empty cache would have room for a session of this length."""
        return blocks_for(num_tokens) * len(layers) <= sum(self._capacity.values())

    def release(self, key: SessionKey) -> None:
        """Gives back all that a session holds. Unknown sessions hold nothing."""
        self._free += self._blocks.pop(key, 0) * len(key.layers)

    @property
    def free_tokens(self) -> int:
        """Tokens of a session through all layers held here that still fit."""
        return self._free // len(self._capacity) * BLOCK_TOKENS if self._capacity else 0

    @property
    def capacity_tokens(self) -> int:
        return sum(self._capacity.values()) // len(self._capacity) * BLOCK_TOKENS if self._capacity else 0

    def check_integrity(self) -> None:
        """Raises AssertionError if a block was lost or counted twice."""
        used = sum(blocks * len(key.layers) for key, blocks in self._blocks.items())
        capacity = sum(self._capacity.values())
        assert self._free >= 0, f"{self._free} layer-blocks are free"
        assert used + self._free == capacity, f"{used} used + {self._free} free != {capacity} in all"
