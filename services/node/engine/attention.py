"""The attention function that all architectures call: it keeps the KV caches and splits a packed row by session.

A step packs the tokens of several sessions as one row. Each segment of the row sees its own session's cache only::

    row        | session a, 3 tokens | b, 1 | c, 1 |
    cache of a | 0 1 2 3 4 . . . |          segment at position 5: writes 5 6 7, attends causally to 0..7
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from services.node.core.batching import DECODED_TOKENS
from services.node.core.workspace import SCORE_VALUES
from services.node.engine.cpu.compiled import attend_loop, bits, loop
from services.node.engine.kernels import attended_rows
from services.node.engine.kv_pool import LayerPool
from services.node.engine.kv_rows import KvRows
from services.node.engine.segments import CachedSegment, Segments

ATTENTION = "meshnet"

# Keys, and as many values, that are made of 8-bit integers at once, unless one head has more: bounds the memory for it.
# On a CPU they stay in its cache, on a GPU each time costs launches.
_VALUES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 23}
# Arguments that change what attention means and that this function does not know.
_UNSUPPORTED = ("position_bias",)


@dataclass(frozen=True, slots=True)
class _Rules:
    """How one layer attends. `window`: how many tokens one sees, itself included. `softcap` bounds the scores before
    the mask. `sinks` `[heads]` are scores that take their part of each softmax and belong to no token."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether torch's own kernels attend so."""
        return self.softcap is None and self.sinks is None

    def first_seen(self, position: int) -> int:
        """The first token that the one at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def of_heads(self, heads: slice) -> _Rules:
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` `[1, heads, total, head_dim]`; `key` and `value` have `kv_heads`.

    Returns `[1, total, heads, head_dim]`.
    """
    unknown = [name for name in _UNSUPPORTED if options.get(name) is not None]
    assert not unknown, unknown
    assert attention_mask is None
    assert not dropout
    layer = module.layer_idx
    assert isinstance(layer, int)
    rules = _Rules(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    if segments.are_apart and rules.is_plain and _have_loops(query, key, value, segments[0].cache.pool(layer)):
        parts = (part[0].transpose(0, 1) for part in (query, key, value))
        heads = torch.cat([part.flatten(1) for part in parts], dim=1)
        packed = attend_packed(layer, heads, query.shape[1], key.shape[1], rules.scaling, rules.window, segments)
        return packed.view(1, len(packed), query.shape[1], -1), None
    return _attend_each(layer, query, key, value, rules, segments)[None], None


def attend_packed(
    layer: int,
    heads: torch.Tensor,
    num_heads: int,
    kv_heads: int,
    scaling: float,
    window: int | None,
    segments: Segments,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attend`, of queries, keys and values in one tensor `[total, (num_heads + 2 * kv_heads) * head_dim]`,
    bfloat16 on the CPU and contiguous. Returns `[total, num_heads * head_dim]`, in `output` if that is given."""
    total, head_dim = len(heads), heads.shape[1] // (num_heads + 2 * kv_heads)
    if output is None:
        output = heads.new_empty(total, num_heads * head_dim)
    pool = segments[0].cache.pool(layer)
    if pool.format.scales or not segments.are_apart:
        query, key, value = _by_head(heads, num_heads, kv_heads)
        each = _attend_each(layer, query, key, value, _Rules(scaling, window, None, None), segments)
        return output.copy_(each.flatten(1))
    places, memory = segments.places(layer, window), pool.rows(kv_heads, head_dim, head_dim)
    packed, (keys, values) = bits(heads), pool.bits
    loop("store")(packed, num_heads, keys, values, places.slots)
    if len(places.short):
        attend_short = attend_loop(head_dim, num_heads // kv_heads)
        attend_short(packed, keys, values, places.short, places.begins, places.ends, scaling, bits(output))
    if places.long:
        query, _, _ = _by_head(heads, num_heads, kv_heads)
        rules, by_head = _Rules(scaling, window, None, None), output.view(total, num_heads, head_dim)
        for segment, start in places.long:
            rows = slice(segment.start, segment.end)
            cached = memory.of(slice(start, start + segment.position + segment.end - segment.start))
            _attend_many(segment, query[:, :, rows], cached, rules, by_head[rows])
    return output


def _by_head(heads: torch.Tensor, num_heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values `[1, heads, total, head_dim]`, as views."""
    by_head = heads.view(1, len(heads), num_heads + 2 * kv_heads, -1).transpose(1, 2)
    query, key, value = torch.split(by_head, [num_heads, kv_heads, kv_heads], dim=1)
    return query, key, value


def _have_loops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pool: LayerPool) -> bool:
    """Whether compiled loops know this kind of attention."""
    on_cpu = query.device.type == "cpu" and query.dtype is torch.bfloat16
    return on_cpu and not pool.format.scales and key.shape == value.shape and query.shape[3] == key.shape[3]


def _attend_each(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: _Rules, segments: Segments
) -> torch.Tensor:
    """`[total, heads, head_dim]`, one segment after the other, so that two may continue one session."""
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    # Of all sessions at once: the work is in the calls.
    new = segments[0].cache.stored(layer, key[0], value[0])
    for segment in segments:
        rows = slice(segment.start, segment.end)
        cached = segment.cache.write(layer, segment.position, new.of(rows))
        if segment.end - segment.start <= (DECODED_TOKENS if query.device.type == "cpu" else 1):
            # Drafts one by one too: then what comes out is the same to the bit as without drafts.
            for row, position in enumerate(range(segment.position, cached.keys.shape[1]), segment.start):
                seen = cached.of(slice(rules.first_seen(position), position + 1))
                _attend_one(query[0, :, row], seen, rules, output[row])
        else:
            _attend_many(segment, query[:, :, rows], cached, rules, output[rows])
    return output


def _attend_one(query: torch.Tensor, seen: KvRows, rules: _Rules, output: torch.Tensor) -> None:
    """Writes the attention of one token's `query` `[heads, head_dim]` to `output`. It sees all of the keys.

    The heads of a group, which share keys, are folded into the length of the query: an order of magnitude faster.
    """
    if seen.are_integers:
        for heads, part in _parts(query.shape[0], seen):
            output[heads] = _attend_to_integers(query[heads], part, rules.of_heads(heads))
        return
    keys, values = seen.keys, seen.values
    if not rules.is_plain:
        output.copy_(_attend_by_rules(query[:, None], keys, values, None, rules)[:, 0])
        return
    kv_heads = keys.shape[0]
    grouped = query.reshape(1, kv_heads, -1, query.shape[-1])
    attended = scaled_dot_product_attention(grouped, keys[None], values[None], scale=rules.scaling)
    output.view(kv_heads, -1, output.shape[-1]).copy_(attended[0])


def _attend_many(
    segment: CachedSegment, query: torch.Tensor, cached: KvRows, rules: _Rules, output: torch.Tensor
) -> None:
    """Writes the attention of `query` `[1, heads, tokens, head_dim]` to `output` `[tokens, heads, head_dim]`."""
    step = attended_rows(query.device)
    if not rules.is_plain:
        step = min(step, max(1, SCORE_VALUES // (query.shape[1] * cached.keys.shape[1])))
    first, last = segment.position, segment.position + query.shape[2]
    while first < last:
        end = min(first - first % step + step, last)
        start, stop = first - segment.position, end - segment.position
        begin = rules.first_seen(first)
        window = rules.window if rules.first_seen(end - 1) else None
        causal = first == 0 and window is None and rules.is_plain
        mask = None if causal else segment.mask(first, end, window, query)
        for heads, part in _parts(query.shape[1], cached.of(slice(begin, end))):
            keys, values = part.dequantized(query.dtype)
            asked = query[:, heads, start:stop]
            if rules.is_plain:
                attended = scaled_dot_product_attention(
                    asked,
                    keys[None],
                    values[None],
                    attn_mask=mask,
                    is_causal=causal,
                    scale=rules.scaling,
                    enable_gqa=asked.shape[1] != keys.shape[0],
                )[0]
            else:
                attended = _attend_by_rules(asked[0], keys, values, mask, rules.of_heads(heads))
            output[start:stop, heads] = attended.transpose(0, 1)
        first = end


def _parts(num_heads: int, seen: KvRows) -> Iterator[tuple[slice, KvRows]]:
    """K and V for which as many values may be made at once, each part with the query heads that see it. All of them
    where nothing needs to be made."""
    kv_heads, length, head_dim = seen.keys.shape
    at_once = max(1, _VALUES_AT_ONCE.get(seen.keys.device.type, 1 << 18) // (length * head_dim))
    if not seen.are_integers or at_once >= kv_heads:
        yield slice(0, num_heads), seen
        return
    group = num_heads // kv_heads
    for first in range(0, kv_heads, at_once):
        last = min(first + at_once, kv_heads)
        yield slice(first * group, last * group), seen.of_heads(slice(first, last))


def _attend_to_integers(query: torch.Tensor, seen: KvRows, rules: _Rules) -> torch.Tensor:
    """`[heads, head_dim]` of one token, in float32. Scales belong to tokens, so they are as well applied to the scores
    and to the weights: there are fewer of those than of keys and values."""
    assert seen.key_scales is not None
    assert seen.value_scales is not None
    heads, kv_heads = query.shape[0], seen.keys.shape[0]
    grouped = (query.float() * rules.scaling).view(kv_heads, -1, query.shape[1])
    scores = torch.bmm(grouped, seen.keys.float().mT).mul_(seen.key_scales.mT)
    weights = _weights(scores.view(heads, 1, -1), None, rules).view(scores.shape).mul_(seen.value_scales.mT)
    return torch.bmm(weights, seen.values.float()).view(heads, -1)


def _attend_by_rules(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rules: _Rules
) -> torch.Tensor:
    """`[heads, tokens, head_dim]`, with scores in float32, for layers that torch's kernels do not know."""
    heads, tokens, _ = query.shape
    kv_heads, length, _ = keys.shape
    # As above, the heads of a group are folded into the length of the query.
    scores = torch.matmul(query.reshape(kv_heads, -1, query.shape[-1]), keys.transpose(1, 2)).float()
    scores = scores.view(heads, tokens, length).mul_(rules.scaling)
    weights = _weights(scores, mask, rules).to(values.dtype)
    return torch.matmul(weights.reshape(kv_heads, -1, length), values).view(heads, tokens, -1)


def _weights(scores: torch.Tensor, mask: torch.Tensor | None, rules: _Rules) -> torch.Tensor:
    """Of `[heads, tokens, length]` scores in float32, which are written over: they are the largest thing in a step."""
    if rules.softcap is not None:
        scores = scores.div_(rules.softcap).tanh_().mul_(rules.softcap)
    if mask is not None:
        scores += mask
    largest = scores.amax(dim=-1, keepdim=True)
    if rules.sinks is None:
        weights = scores.sub_(largest).exp_()
        return weights.div_(weights.sum(dim=-1, keepdim=True))
    # A sink takes its part of the sum and belongs to no token.
    sinks = rules.sinks.to(scores.dtype).view(-1, 1, 1)
    largest = torch.maximum(largest, sinks)
    weights = scores.sub_(largest).exp_()
    return weights.div_(weights.sum(dim=-1, keepdim=True).add_((sinks - largest).exp_()))


def _no_mask(*_: object, **__: object) -> None:
    """The models build no masks: each segment's is known from its position."""


def register() -> None:
    """Makes the function known to transformers under the name ATTENTION. Again is no harm."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
