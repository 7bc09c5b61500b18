"""A shard in memory: its layers, and what an entry node needs on top."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from meshnet.model import LayerRange
from services.node.engine.kernels import TiedHead
from services.node.engine.kv_pool import LayerPool
from services.node.engine.linear import held_bytes
from services.node.engine.precision import converted


@dataclass(frozen=True, slots=True)
class HeldLayer:
    """One decoder layer. `dtype` is that of its activations and of its KV cache; `rotary_kind` says which of the
    model's rotary embeddings it uses, if there are several."""

    module: nn.Module
    dtype: torch.dtype
    rotary_kind: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """What turns tokens into hidden states and back. A tied head shares the embedding's tensor.

    Learned `positions` begin at row `position_offset`; `logit_softcap` bounds the logits. The scales are factors.
    """

    embedding: nn.Module
    positions: nn.Embedding | None
    norm: nn.Module
    head: nn.Module
    dtype: torch.dtype
    position_offset: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def embed(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """`[1, tokens]` ids and positions to `[1, tokens, hidden]`."""
        hidden: torch.Tensor = self.embedding(token_ids)
        if self.embedding_scale != 1.0:
            hidden = hidden * self.embedding_scale
        if self.positions is None:
            return hidden
        return hidden + nn.functional.embedding(position_ids + self.position_offset, self.positions.weight)

    def largest_logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[rows, hidden]`, the last layer's output, to the largest logit of each row and the first token that has
        it."""
        if isinstance(self.head, TiedHead) and self.logit_scale == 1.0 and self.logit_softcap is None:
            found = self.head.greedy(self.norm(converted(hidden, self.dtype)))
            if found:
                return found
        # The first of equals, as torch promises. Five times as fast as argmax where rows are not contiguous.
        largest, tokens = self.logits(hidden).max(dim=-1)
        return largest, tokens

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]`, the last layer's output, to `[rows, vocab]` in the model's dtype."""
        logits: torch.Tensor = self.head(self.norm(converted(hidden, self.dtype)))
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return logits if self.logit_softcap is None else torch.tanh(logits / self.logit_softcap) * self.logit_softcap


# (any tensor, position_ids [1, tokens], layer_type where there are several) -> (cos, sin) in the tensor's dtype.
Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TorchShard:
    """A loaded shard of `model_id`. `entry` is there if it starts at layer 0, `rotary` if the model has one.

    `kv` is the memory for the KV caches of its layers.
    """

    model_id: str
    range: LayerRange
    layers: Mapping[int, HeldLayer]
    entry: Entry | None
    rotary: Rotary | None
    hidden_size: int
    vocab_size: int
    context_length: int
    kv: Mapping[int, LayerPool] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the memory for its KV caches takes."""
        return sum(pool.allocated_bytes for pool in self.kv.values())

    @property
    def modules(self) -> list[nn.Module]:
        """What holds its weights."""
        parts = [layer.module for layer in self.layers.values()]
        if self.entry is not None:
            entry = (self.entry.embedding, self.entry.positions, self.entry.norm, self.entry.head)
            parts += [part for part in entry if part is not None]
        return parts

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights take, as measured."""
        return held_bytes(nn.ModuleList(self.modules))
