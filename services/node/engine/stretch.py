"""Consecutive layers of one kind, run one after the other or as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import groupby
from typing import Any

import torch

from services.node.engine.cpu.whole import WholeLayers, sizes_of
from services.node.engine.precision import converted
from services.node.engine.segments import Segments
from services.node.engine.shard import HeldLayer


class Stretch:
    """Layers of one dtype and one kind of rotary embedding; `as_one`: of equal sizes, which a loop can run."""

    def __init__(self, layers: Iterable[HeldLayer], *, as_one: bool) -> None:
        self._layers = tuple(layers)
        first = self._layers[0]
        self.dtype, self.rotary_kind = first.dtype, first.rotary_kind
        modules: list[Any] = [layer.module for layer in self._layers]
        self._whole = WholeLayers(modules) if as_one else None

    def run(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, segments: Segments, rotation: dict[str, Any]
    ) -> torch.Tensor:
        """`[1, tokens, hidden]` through all of them. `rotation`: the embeddings, if they take any, by their name."""
        if self._whole:
            done = self._whole.run(hidden[0], rotation["position_embeddings"], segments)
            if done is not None:
                return done[None]
        for layer in self._layers:
            hidden = layer.module(
                converted(hidden, self.dtype),
                attention_mask=None,
                position_ids=position_ids,
                use_cache=False,
                segments=segments,
                **rotation,
            )
        return hidden


def stretches_of(layers: Iterable[HeldLayer]) -> list[Stretch]:
    return [Stretch(alike, as_one=kind[2] is not None) for kind, alike in groupby(layers, _kind)]


def _kind(layer: HeldLayer) -> tuple[Hashable, ...]:
    return layer.dtype, layer.rotary_kind, sizes_of(layer.module)
