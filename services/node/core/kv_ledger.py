"""The promise of KV cache room, in numbers: who has how much, and that it always adds up."""

from __future__ import annotations

from meshnet.errors import KvFull
from meshnet.model import BLOCK_TOKENS, LayerRange, blocks_for
from services.node.core.work import SessionKey


class KvLedger:
    """KV room of one model on this node, in blocks of 128 tokens, layer by layer: as the memory for it is.

    Of what is free, some may still hold what ended sessions have left, to be reused. That is kept until somebody needs
    the room, and given up in the order in which it was last used::

        blocks of a layer | session a | session b | kept c | kept d | empty |
                          |       in use          |          free           |

    Invariant (`check_integrity`): in each layer the blocks of all sessions plus the free ones are the capacity, and no
    more are kept than are free.
    """

    def __init__(self) -> None:
        self._capacity: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._kept_in: dict[int, int] = {}
        self._blocks: dict[SessionKey, int] = {}
        # In the order in which they were last used.
        self._kept: dict[SessionKey, int] = {}

    def add_layers(self, layers: LayerRange, kv_tokens: int) -> None:
        """Promises room for `kv_tokens` tokens in each of these layers, through which nothing is kept."""
        for layer in layers.layers:
            self._capacity[layer] = self._free[layer] = blocks_for(kv_tokens)
            self._kept_in[layer] = 0

    def remove_layers(self, layers: LayerRange) -> None:
        """Takes the promise back. Sessions that run through these layers must have been freed, kept ones given up."""
        for layer in layers.layers:
            for counts in (self._capacity, self._free, self._kept_in):
                counts.pop(layer, None)

    def check_room(self, key: SessionKey, num_tokens: int) -> None:
        """Raises KvFull if the session cannot have room for `num_tokens` in all."""
        free = min(self._free.get(layer, 0) for layer in key.layers.layers)
        if blocks_for(num_tokens) - self.held_blocks(key) > free:
            raise KvFull(
                f"the KV cache has no room for {num_tokens} tokens of session {key.session}: "
                f"{free * BLOCK_TOKENS} tokens are free"
            )

    def reserve(self, key: SessionKey, num_tokens: int) -> tuple[SessionKey, ...]:
        """Makes sure that the session has room for `num_tokens` in all. Returns what is given up for it.

        Raises KvFull and changes nothing.
        """
        held = self.held_blocks(key)
        extra = blocks_for(num_tokens) - held
        if extra <= 0:
            return ()
        self.check_room(key, num_tokens)
        for layer in key.layers.layers:
            self._free[layer] -= extra
        self._blocks[key] = held + extra
        return self._give_up(key.layers)

    def release(self, key: SessionKey) -> None:
        """Gives back all that a session holds. Unknown sessions hold nothing."""
        blocks = self._blocks.pop(key, 0)
        for layer in key.layers.layers:
            if layer in self._free:
                self._free[layer] += blocks

    def keep(self, key: SessionKey, num_blocks: int) -> None:
        """The session ends, and what is in its first blocks is kept: the latest used of all."""
        assert 0 < num_blocks <= self._blocks[key], (key, num_blocks)
        self.release(key)
        self._kept[key] = num_blocks
        for layer in key.layers.layers:
            self._kept_in[layer] += num_blocks

    def use(self, key: SessionKey) -> None:
        """What is kept is the latest used of all now, if it is."""
        if (blocks := self._kept.pop(key, None)) is not None:
            self._kept[key] = blocks

    def give_up(self, key: SessionKey) -> None:
        """It is not kept any longer, if it was."""
        blocks = self._kept.pop(key, 0)
        for layer in key.layers.layers:
            if layer in self._kept_in:
                self._kept_in[layer] -= blocks

    def held_blocks(self, key: SessionKey) -> int:
        """What a session has, in each of its layers."""
        return self._blocks.get(key, 0)

    @property
    def free_tokens(self) -> int:
        """Tokens of a session through all layers held here that still fit."""
        return min(self._free.values(), default=0) * BLOCK_TOKENS

    @property
    def kept_tokens(self) -> int:
        """Of these, tokens that are kept: in the layer that has the most."""
        return max(self._kept_in.values(), default=0) * BLOCK_TOKENS

    @property
    def capacity_tokens(self) -> int:
        """Tokens of all sessions, each through all layers held here, that an empty cache has room for."""
        return min(self._capacity.values(), default=0) * BLOCK_TOKENS

    def check_integrity(self) -> None:
        """Raises AssertionError if a block was lost or counted twice."""
        assert self._free.keys() == self._capacity.keys() == self._kept_in.keys()
        assert self._kept.keys().isdisjoint(self._blocks)
        for layer, capacity in self._capacity.items():
            used = sum(blocks for key, blocks in self._blocks.items() if layer in key.layers)
            kept = sum(blocks for key, blocks in self._kept.items() if layer in key.layers)
            free = self._free[layer]
            assert used + free == capacity, f"layer {layer}: {used} used + {free} free != {capacity} in all"
            assert kept == self._kept_in[layer], f"layer {layer}: {kept} kept, {self._kept_in[layer]} counted"
            assert 0 <= kept <= free, f"layer {layer}: {kept} of {free} free blocks are kept"

    def _give_up(self, layers: LayerRange) -> tuple[SessionKey, ...]:
        """Of what is kept in these layers, the least recently used, until the rest is in free blocks again."""
        given_up = []
        for key in tuple(self._kept):
            short = [layer for layer in layers.layers if self._kept_in[layer] > self._free[layer]]
            if not short:
                break
            if any(layer in key.layers for layer in short):
                self.give_up(key)
                given_up.append(key)
        return tuple(given_up)
