"""Attention of a few rows on one core that has matrix units.

Keys are tile A as they lie in memory, and the queries of all heads that share them the columns of tile B. Of values two
tokens after the other have to lie side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.node.engine.cpu import tiles
from services.node.engine.cpu.loops import inner, rounded, weigh


@inner
def attend(heads: Any, keys: Any, values: Any, begins: Any, ends: Any, scaling: Any, out: Any) -> None:
    """Each row of `heads` attends to tokens `[begin, end)` of its own of `keys` and `values`
    `[kv_heads, tokens, head_dim]`. Fills `out` `[rows, heads * head_dim]`.

    Memory is asked for values while scores are made, and for the keys of the next head while values are summed up.
    """
    rows, (kv_heads, tokens, head_dim) = len(begins), keys.shape
    group = out.shape[1] // head_dim // kv_heads
    # To whole tiles of tokens, which are 32 where they are summed over.
    longest = 0
    for row in range(rows):
        longest = max(longest, ends[row] - begins[row])
    longest = (longest + 31) // 32 * 32
    asked = np.zeros(16 * head_dim, np.uint16)
    scores, weights = np.empty((16, longest), np.float32), np.empty((16, longest), np.uint16)
    totals = np.empty(16, np.float32)
    few, pairs = np.zeros(16 * head_dim, np.uint16), np.empty(16 * 64, np.uint16)
    nothing, sums = np.zeros(32, np.uint16), np.empty(16 * 32, np.float32)
    all_keys, all_values = keys.reshape(-1), values.reshape(-1)
    most = 16 // group
    row = 0
    while row < rows:
        # Rows of one session stay with a head together: its keys and values are read from memory once.
        end = _end_of_session(begins, row)
        for head in range(kv_heads):
            start = (head * tokens + begins[row]) * head_dim
            first = head * group * head_dim
            for at in range(row, end, most):
                to = min(at + most, end)
                columns = (to - at) * group
                count = np.max(ends[at:to]) - begins[row]
                if to < end:
                    next_start = start
                elif head + 1 < kv_heads:
                    next_start = start + tokens * head_dim
                else:
                    next_start = begins[end] * head_dim if end < rows else start
                tiles.configure((16, 16, 16, columns, columns, columns, 16, 16), (64, 64, 64, 64, 64, 64, 64, 64))
                make_columns(heads[at:to], first, group, head_dim, asked)
                _score(all_keys, start, count, head_dim, asked, few, all_values, scaling, scores[:columns])
                for c in range(columns):
                    totals[c] = _weigh(scores[c], ends[at + c // group] - begins[row], count, weights[c])
                for part in range(0, head_dim, 32):
                    _sum(
                        all_values, start + part, count, head_dim, weights, nothing, pairs,
                        all_keys, next_start, sums,
                    )  # fmt: skip
                    next_start += head_dim * ((count + 31) // 32 * 32) // (head_dim // 32)
                    _divide(sums, totals, first + part, group, head_dim, columns, out[at:to])
        row = end
    tiles.release()


@inner
def _divide(sums: Any, totals: Any, first: Any, group: Any, head_dim: Any, columns: Any, out: Any) -> None:
    """`sums` `[columns, 32]` by `totals`, to 32 values of each head of a group, the first at `first` in rows of `out`
    `[rows, heads * head_dim]`."""
    for c in range(columns):
        made, place = sums[32 * c : 32 * c + 32], first + c % group * head_dim
        to = out[c // group, place : place + 32]
        scale = np.float32(1.0) / totals[c]
        for i in range(32):
            to[i] = rounded(made[i] * scale)


@inner
def make_columns(rows: Any, first: Any, group: Any, head_dim: Any, asked: Any) -> None:
    """Tile B of the heads of a group, from `first` on in `[rows, heads * head_dim]`: to `asked`
    `[head_dim / 2, 16, 2]`."""
    for row in range(len(rows)):
        for g in range(group):
            column, place = 2 * (row * group + g), first + g * head_dim
            query = rows[row, place : place + head_dim]
            for i in range(0, head_dim, 2):
                asked[16 * i + column], asked[16 * i + column + 1] = query[i], query[i + 1]


@inner
def _end_of_session(begins: Any, row: Any) -> Any:
    """Behind the last of the rows from this one on that begin at the same token, and so are of one session."""
    end = row + 1
    while end < len(begins) and begins[end] == begins[row]:
        end += 1
    return end


@inner
def _score(
    keys: Any, start: Any, count: Any, head_dim: Any, asked: Any, few: Any, values: Any, scaling: Any, scores: Any
) -> None:
    """So many `[tokens, head_dim]` from `start` on of `keys` times `asked` `[head_dim / 2, 16, 2]`, to `scores`
    `[columns, >= tokens]`. `few` holds the last of them, if they do not fill a tile: what lies behind is not theirs."""
    whole = start + count // 16 * 16 * head_dim
    end = start + count * head_dim
    sums = np.empty(256, np.float32)
    token = 0
    for place in range(start, end, 16 * head_dim):
        for line in range(place, place + 16 * head_dim, tiles.LINE_VALUES):
            tiles.prefetch(values, line)
        if place == whole:
            for i in range(end - whole):
                few[i] = keys[whole + i]
        tiles.zero(0)
        for i in range(0, head_dim, 32):
            if place < whole:
                tiles.load(1, keys, place + i, 2 * head_dim)
            else:
                tiles.load(1, few, i, 2 * head_dim)
            tiles.load(2, asked, 16 * i, 64)
            tiles.multiply(0, 1, 2)
        tiles.store(0, sums, 0, 64)
        for c in range(len(scores)):
            to = scores[c, token : token + 16]
            for t in range(16):
                to[t] = sums[16 * t + c] * scaling
        token += 16


@inner
def _weigh(scores: Any, seen: Any, count: Any, to: Any) -> Any:
    """Weights of scores, for those that are seen of so many tokens, to `to`, with zeros behind to a whole tile; returns
    what they are yet to be divided by."""
    total = weigh(scores[:seen])
    for token in range(seen):
        to[token] = rounded(scores[token])
    for token in range(seen, (count + 31) // 32 * 32):
        to[token] = 0
    return total


@inner
def _sum(
    values: Any, start: Any, count: Any, head_dim: Any, weights: Any, nothing: Any, pairs: Any,
    keys: Any, next_start: Any, sums: Any,
) -> None:  # fmt: skip
    """Of so many rows of `values`, each `head_dim` behind the last, 32 from `start` on, weighted by `weights`
    `[group, >= tokens]`, to `sums` `[group, 32]`. Behind the last token is `nothing`, 32 zeros: whatever lies there may
    not be a number. `keys` from `next_start` on are wanted next."""
    longest, flat = weights.shape[1], weights.reshape(-1)
    tiles.zero(3)
    tiles.zero(4)
    for token in range(0, count, 32):
        for pair in range(16):
            tiles.prefetch(keys, next_start)
            tiles.prefetch(keys, next_start + tiles.LINE_VALUES)
            next_start += 2 * tiles.LINE_VALUES
            low, to = token + 2 * pair, 64 * pair
            place = start + low * head_dim
            if low + 1 < count:
                tiles.interleave(values, place, values, place + head_dim, pairs, to)
            elif low < count:
                tiles.interleave(values, place, nothing, 0, pairs, to)
            else:
                tiles.interleave(nothing, 0, nothing, 0, pairs, to)
        tiles.load(5, flat, token, 2 * longest)
        tiles.load(6, pairs, 0, 128)
        tiles.load(7, pairs, 32, 128)
        tiles.multiply(3, 5, 6)
        tiles.multiply(4, 5, 7)
    tiles.store(3, sums, 0, 128)
    tiles.store(4, sums, 16, 128)
