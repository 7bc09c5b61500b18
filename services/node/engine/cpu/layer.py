"""Whole layers as one compiled loop, for a few rows on one core that has matrix units.

Nothing is left to Python in a step but to call it, so that other threads run meanwhile. Weights are asked for some time
before they are needed: where oneDNN takes them as they come, memory gives half as much. Products are oneDNN's to the
bit. Weights come as `PackedLinear` holds them, `[out / 32, in / 2, 32, 2]`: of 32 outputs those of two inputs, side by
side.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from services.node.engine.cpu import loops, tiles
from services.node.engine.cpu.attend import attend
from services.node.engine.cpu.loops import inner, rounded, widened

# As many as two tiles have, which is also where oneDNN begins to add up in another order.
MAX_ROWS = 2 * tiles.TILE_ROWS
# Heads that share keys: they are the columns of a tile.
MAX_GROUP = tiles.TILE_ROWS
# Outputs whose weights lie together.
BLOCK = 32
# Values of weights ahead of those that are multiplied, that memory is asked for.
_AHEAD = 1024

_rms_norm, _add_rms_norm = inner(loops.rms_norm), inner(loops.add_rms_norm)
_norm_heads, _rotate, _store = inner(loops.norm_heads), inner(loops.rotate), inner(loops.store)
_silu_mul = inner(loops.silu_mul)


@inner
def multiply(rows: Any, weights: Any, bias: Any, out: Any) -> None:
    """`rows` `[n, in]` with packed weights, and a bias `[out]` or `[0]`, to `out` `[n, out]`; n at most MAX_ROWS."""
    count, depth = rows.shape
    first_rows, more_rows = min(count, 16), max(count - 16, 1)
    tiles.configure(
        (first_rows, first_rows, more_rows, more_rows, first_rows, more_rows, 16, 16), (64, 64, 64, 64, 64, 64, 64, 64)
    )
    flat, sums = rows.reshape(-1), np.empty(MAX_ROWS * BLOCK, np.float32)
    place = 0
    for block in range(0, out.shape[1], BLOCK):
        tiles.zero(0)
        tiles.zero(1)
        tiles.zero(2)
        tiles.zero(3)
        for i in range(0, depth, 32):
            for line in range(place + _AHEAD, place + _AHEAD + BLOCK * 32, tiles.LINE_VALUES):
                tiles.prefetch(weights, line)
            tiles.load(4, flat, i, 2 * depth)
            tiles.load(6, weights, place, 4 * BLOCK)
            tiles.load(7, weights, place + 32, 4 * BLOCK)
            tiles.multiply(0, 4, 6)
            tiles.multiply(1, 4, 7)
            if count > 16:
                tiles.load(5, flat, 16 * depth + i, 2 * depth)
                tiles.multiply(2, 5, 6)
                tiles.multiply(3, 5, 7)
            place += BLOCK * 32
        tiles.store(0, sums, 0, 4 * BLOCK)
        tiles.store(1, sums, 16, 4 * BLOCK)
        if count > 16:
            tiles.store(2, sums, 16 * BLOCK, 4 * BLOCK)
            tiles.store(3, sums, 16 * BLOCK + 16, 4 * BLOCK)
        for row in range(count):
            made, to = sums[row * BLOCK : row * BLOCK + BLOCK], out[row, block : block + BLOCK]
            if len(bias):
                for o in range(BLOCK):
                    to[o] = rounded(made[o] + widened(bias[block + o]))
            else:
                for o in range(BLOCK):
                    to[o] = rounded(made[o])
    tiles.release()


# What a row of the table says of a layer: where its weights, norms, keys and values lie (0: it has none), for how many
# tokens those have room, and whether queries and keys are rotated.
TABLE = (
    "qkv", "qkv_bias", "output", "output_bias", "gate_up", "gate_up_bias", "down", "down_bias", "input_norm",
    "output_norm", "query_norm", "key_norm", "keys", "values", "tokens", "rotates",
)  # fmt: skip
(
    _QKV, _QKV_BIAS, _OUTPUT, _OUTPUT_BIAS, _GATE_UP, _GATE_UP_BIAS, _DOWN, _DOWN_BIAS, _INPUT_NORM,
    _OUTPUT_NORM, _QUERY_NORM, _KEY_NORM, _KEYS, _VALUES, _TOKENS, _ROTATES,
) = range(len(TABLE))  # fmt: skip


def make_layers(version: int) -> Any:
    """The loop of consecutive layers. `version` is that of the code that it is made of."""

    def layers(
        hidden: Any, table: Any, epsilons: Any, scalings: Any, sizes: Any,
        cos: Any, sin: Any, slots: Any, begins: Any, out: Any,
    ) -> None:  # fmt: skip
        """`hidden` `[rows, width]` through all layers of `table`, to `out`. In each: norm, attention, norm, gated
        layer, each pair added to what comes in.

        `epsilons` `[layers, 4]` of its norms, `scalings` `[layers]` of scores, `sizes`: of a head, how many, how many
        with keys, and of the gated layer. `cos` and `sin` `[rows, head_dim]`; each row is stored at its slot and sees
        those from `begins` to it, `[layers, rows]` both.
        """
        assert version
        (rows, width), (head_dim, num_heads, kv_heads, gated) = hidden.shape, sizes
        normed, more = np.empty((rows, width), np.uint16), np.empty((rows, width), np.uint16)
        heads = np.empty((rows, (num_heads + 2 * kv_heads) * head_dim), np.uint16)
        attended = np.empty((rows, num_heads * head_dim), np.uint16)
        gates, product = np.empty((rows, 2 * gated), np.uint16), np.empty((rows, gated), np.uint16)
        between = np.empty((rows, width), np.uint16)
        come = hidden
        for index in range(len(table)):
            at, epsilon = table[index], epsilons[index]
            # What comes out of one is what the next one reads, and the last one's is `out`.
            total = between if (len(table) - index) % 2 == 0 else out
            _rms_norm(come, _array(at[_INPUT_NORM], width), epsilon[0], normed)
            _multiply(normed, at[_QKV], at[_QKV_BIAS], heads)
            if at[_QUERY_NORM]:
                _norm_heads(heads, 0, num_heads, _array(at[_QUERY_NORM], head_dim), epsilon[2])
                _norm_heads(heads, num_heads, kv_heads, _array(at[_KEY_NORM], head_dim), epsilon[3])
            if at[_ROTATES]:
                _rotate(heads, num_heads + kv_heads, cos, sin)
            size = kv_heads * at[_TOKENS] * head_dim
            keys = _array(at[_KEYS], size).reshape((kv_heads, at[_TOKENS], head_dim))
            values = _array(at[_VALUES], size).reshape((kv_heads, at[_TOKENS], head_dim))
            _store(heads, num_heads, keys, values, slots[index])
            attend(heads, keys, values, begins[index], slots[index] + 1, scalings[index], attended)
            _multiply(attended, at[_OUTPUT], at[_OUTPUT_BIAS], more)
            _add_rms_norm(come, more, _array(at[_OUTPUT_NORM], width), epsilon[1], total, normed)
            _multiply(normed, at[_GATE_UP], at[_GATE_UP_BIAS], gates)
            _silu_mul(gates, product)
            _multiply(product, at[_DOWN], at[_DOWN_BIAS], more)
            _add(more, total)
            come = total

    return layers


def _generate_pointer(_context: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(types.uint16)(types.int64), code


_pointer: Any = intrinsic(_generate_pointer)
_numba: Any = numba
_carray = _numba.carray


@inner
def _array(address: Any, size: Any) -> Any:
    """So many values of 16 bits, which somebody else keeps."""
    return _carray(_pointer(address), (size,))


@inner
def _multiply(rows: Any, weights: Any, bias: Any, out: Any) -> None:
    """As `multiply`, with what lies at addresses."""
    width = out.shape[1]
    multiply(rows, _array(weights, rows.shape[1] * width), _array(bias, width if bias else 0), out)


@inner
def _add(more: Any, total: Any) -> None:
    """Adds `[rows, width]` to another."""
    rows, width = total.shape
    for row in range(rows):
        sums, added = total[row], more[row]
        for i in range(width):
            sums[i] = rounded(widened(sums[i]) + widened(added[i]))
