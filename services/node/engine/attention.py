"""The attention function that all architectures call: it keeps the KV caches and splits a packed row by session.

A step packs the tokens of several sessions as one row. Each segment of the row sees its own session's cache only::

    row        | session a, 3 tokens | b, 1 | c, 1 |
    cache of a | 0 1 2 3 4 . . . |          segment at position 5: writes 5 6 7, attends causally to 0..7
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from services.node.engine.kv_cache import KvCache

ATTENTION = "meshnet"

# Rows of a long prompt that are attended for at once: bounds the mask, and skips keys that lie after them all.
_QUERY_ROWS = 512
# Arguments that change what attention means and that this function does not know.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(slots=True)
class CachedSegment:
    """Rows `[start, end)` of a packed row, which follow on the first `position` tokens of a cache."""

    start: int
    end: int
    position: int
    cache: KvCache
    _masks: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, first: int, end: int, query: torch.Tensor) -> torch.Tensor:
        """What tokens `[first, end)` of the session do not see of the first `end`, to be added to scores.

        In the query's dtype, which the kernels would convert a boolean mask to in each layer anew.
        """
        key = (first, end, query.dtype)
        if key not in self._masks:
            hidden = torch.full((end - first, end), float("-inf"), dtype=query.dtype, device=query.device)
            self._masks[key] = hidden.triu(first + 1)
        return self._masks[key]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: tuple[CachedSegment, ...],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` `[1, heads, total, head_dim]`; `key` and `value` have `kv_heads`.

    Returns `[1, total, heads, head_dim]`. Segments are run in order, so that two may continue one session.
    """
    unknown = [name for name in _UNSUPPORTED if options.get(name) is not None]
    assert not unknown, unknown
    assert attention_mask is None
    assert not dropout
    layer = module.layer_idx
    assert isinstance(layer, int)
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    for segment in segments:
        rows = slice(segment.start, segment.end)
        keys, values = segment.cache.write(layer, segment.position, key[0, :, rows], value[0, :, rows])
        if segment.end - segment.start == 1:
            _attend_one(query[0, :, segment.start], keys, values, scaling, output[segment.start])
        else:
            _attend_many(segment, query[:, :, rows], keys, values, scaling, output[rows])
    return output[None], None


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, output: torch.Tensor
) -> None:
    """Writes the attention of one token's `query` `[heads, head_dim]` to `output`. It sees the whole cache.

    The heads of a group, which share keys, are folded into the length of the query: an order of magnitude faster.
    """
    kv_heads = keys.shape[0]
    grouped = query.view(1, kv_heads, -1, query.shape[-1])
    attended = scaled_dot_product_attention(grouped, keys[None], values[None], scale=scaling)
    output.view(kv_heads, -1, output.shape[-1]).copy_(attended[0])


def _attend_many(
    segment: CachedSegment,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    output: torch.Tensor,
) -> None:
    """Writes the attention of `query` `[1, heads, tokens, head_dim]` to `output` `[tokens, heads, head_dim]`."""
    grouped = query.shape[1] != keys.shape[0]
    for start in range(0, query.shape[2], _QUERY_ROWS):
        stop = min(start + _QUERY_ROWS, query.shape[2])
        first, end = segment.position + start, segment.position + stop
        attended = scaled_dot_product_attention(
            query[:, :, start:stop],
            keys[None, :, :end],
            values[None, :, :end],
            attn_mask=segment.mask(first, end, query) if first else None,
            is_causal=first == 0,
            scale=scaling,
            enable_gqa=grouped,
        )
        output[start:stop] = attended[0].transpose(0, 1)


def _no_mask(*_: object, **__: object) -> None:
    """The models build no masks: each segment's is known from its position."""


def register() -> None:
    """Makes the function known to transformers under the name ATTENTION. Again is no harm."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
