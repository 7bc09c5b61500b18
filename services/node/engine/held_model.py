"""The attached layers of one model, and running them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshnet.errors import WrongLayers
from meshnet.model import LayerRange, merge_layers
from services.node.engine.precision import converted
from services.node.engine.segments import CachedSegment, Segments
from services.node.engine.shard import Entry, HeldLayer, Rotary, TorchShard
from services.node.engine.stretch import Stretch, stretches_of


class HeldModel:
    """Layers come and go in pieces; any contiguous part of them can be run."""

    def __init__(self, shard: TorchShard) -> None:
        self.hidden_size = shard.hidden_size
        self.vocab_size = shard.vocab_size
        self.context_length = shard.context_length
        self._rotary: Rotary | None = shard.rotary
        self._layers: dict[int, HeldLayer] = {}
        self._entry: Entry | None = None
        self._stretches: dict[LayerRange, list[Stretch]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._layers

    def attach(self, shard: TorchShard) -> None:
        self._layers |= shard.layers
        self._stretches.clear()
        self._entry = shard.entry or self._entry

    def detach(self, layers: LayerRange) -> None:
        for layer in layers.layers:
            self._layers.pop(layer, None)
        self._stretches.clear()
        if 0 in layers:
            self._entry = None

    def entry(self) -> Entry:
        """Raises WrongLayers if layer 0 is not held here."""
        if self._entry is None:
            raise WrongLayers("this node does not hold layer 0, the embedding and the LM head")
        return self._entry

    def check_held(self, layers: LayerRange) -> None:
        """Raises WrongLayers if not all of them are held."""
        if not self._layers.keys() >= set(layers.layers):
            held = ", ".join(map(str, merge_layers(set(self._layers))))
            raise WrongLayers(f"layers {layers} are not all held here; {held} are")

    def forward(
        self,
        layers: LayerRange,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        segments: Sequence[CachedSegment],
    ) -> torch.Tensor:
        """Runs layers over `[1, tokens, hidden]`, which `segments` divide, and extends their caches.

        Returns `[1, tokens, hidden]` in the last layer's dtype. The caches' lengths stay as they are.
        """
        row = Segments(segments)
        rotations: dict[tuple[torch.dtype, str | None], dict[str, object]] = {}
        if layers not in self._stretches:
            self._stretches[layers] = stretches_of(self._layers[index] for index in layers.layers)
        for stretch in self._stretches[layers]:
            hidden = converted(hidden, stretch.dtype)
            kind = stretch.dtype, stretch.rotary_kind
            if kind not in rotations:
                rotations[kind] = self._rotations(hidden, position_ids, stretch.rotary_kind)
            hidden = stretch.run(hidden, position_ids, row, rotations[kind])
        return converted(hidden, hidden.dtype)

    def _rotations(self, hidden: torch.Tensor, position_ids: torch.Tensor, kind: str | None) -> dict[str, object]:
        if self._rotary is None:
            return {}
        options = {} if kind is None else {"layer_type": kind}
        return {"position_embeddings": self._rotary(hidden, position_ids=position_ids, **options)}
