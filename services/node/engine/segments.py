"""A step packs the tokens of several sessions as one row: each segment of it follows on what its session has cached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch

from services.node.core.batching import DECODED_TOKENS
from services.node.engine.cpu.compiled import Bits, bits
from services.node.engine.kv_cache import KvCache

Rotation = tuple[torch.Tensor, torch.Tensor]
Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class CachedSegment:
    """Rows `[start, end)` of a packed row, which follow on the first `position` tokens of a cache."""

    start: int
    end: int
    position: int
    cache: KvCache
    _masks: dict[tuple[int, int, int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, first: int, end: int, window: int | None, query: torch.Tensor) -> torch.Tensor:
        """What tokens `[first, end)` of the session do not see of those from the first that any sees to `end`, to be
        added to scores.

        In the query's dtype, which the kernels would convert a boolean mask to in each layer anew.
        """
        key = (first, end, window, query.dtype)
        if key not in self._masks:
            begin = 0 if window is None else max(0, first + 1 - window)
            hidden = torch.full((end - first, end - begin), float("-inf"), dtype=query.dtype, device=query.device)
            mask = hidden.triu(first - begin + 1)
            self._masks[key] = mask if window is None else mask + hidden.tril(first - begin - window)
        return self._masks[key]


@dataclass(frozen=True, slots=True)
class Places:
    """Where in a layer's memory the tokens of a step are.

    `slots` of all its rows. Those in `short` are of segments that decode, drafts included, and see the slots
    from `begins` to `ends`;
    `long` are the other segments, each with the slot at which its session begins.
    """

    slots: Tokens
    short: Tokens
    begins: Tokens
    ends: Tokens
    long: tuple[tuple[CachedSegment, int], ...]


class Segments(Sequence[CachedSegment]):
    """Those of one step, in order."""

    def __init__(self, segments: Iterable[CachedSegment]) -> None:
        self._segments = tuple(segments)
        # Two of one session must be written and attended for one after the other.
        self.are_apart = len({id(segment.cache) for segment in self._segments}) == len(self._segments)
        self._places: dict[tuple[int | None, ...], Places] = {}
        self._rotations: dict[int, tuple[Rotation, Bits, Bits]] = {}

    def __len__(self) -> int:
        return len(self._segments)

    @overload
    def __getitem__(self, index: int) -> CachedSegment: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[CachedSegment]: ...

    def __getitem__(self, index: int | slice) -> CachedSegment | Sequence[CachedSegment]:
        return self._segments[index]

    def places(self, layer: int, window: int | None) -> Places:
        """Those of a layer in which a token sees so many; mostly the same in all layers, and so made once."""
        starts = [segment.cache.first_slot(layer) for segment in self._segments]
        key = (window, *starts)
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = self._find(starts, window)
        return places

    def slots(self, layers: Sequence[int]) -> tuple[Tokens, Tokens]:
        """`[layers, rows]` twice: where in each layer's memory the session of each row begins, and where the row is."""
        starts = [[segment.cache.first_slot(layer) for segment in self._segments] for layer in layers]
        firsts = np.repeat(_array(starts), [segment.end - segment.start for segment in self._segments], axis=1)
        positions = [segment.position + row for segment in self._segments for row in range(segment.end - segment.start)]
        return firsts, firsts + _array(positions)

    def rotation(self, embeddings: Rotation) -> tuple[Bits, Bits]:
        """Cosines and sines `[1, total, head_dim]` as compiled loops take them: made once for all layers."""
        found = self._rotations.get(id(embeddings))
        if found is None:
            cos, sin = embeddings
            # The embeddings are kept too, so that no others have their identity.
            found = self._rotations[id(embeddings)] = embeddings, bits(cos[0]), bits(sin[0])
        return found[1:]

    def _find(self, starts: list[int], window: int | None) -> Places:
        slots: list[int] = []
        short: list[int] = []
        begins: list[int] = []
        long: list[tuple[CachedSegment, int]] = []
        for segment, start in zip(self._segments, starts, strict=True):
            first = start + segment.position
            slots += range(first, first + segment.end - segment.start)
            if segment.end - segment.start > DECODED_TOKENS:
                long.append((segment, start))
                continue
            short += range(segment.start, segment.end)
            begins += [start if window is None else max(start, slot + 1 - window) for slot in slots[segment.start :]]
        ends = [slots[row] + 1 for row in short]
        return Places(_array(slots), _array(short), _array(begins), _array(ends), tuple(long))


def _array(tokens: list[int] | list[list[int]]) -> Tokens:
    return np.array(tokens, np.int64)
