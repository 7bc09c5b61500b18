"""The loops that a CPU runs compiled, in place of chains of torch's small operations.

Arrays of bfloat16 come as their bits, uint16, which compiled loops know as the upper half of a float32 only. Each row's
result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

# Sums may be taken in any order; what is not a number stays so, and a division by zero gives what it gives in torch.
OPTIONS: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "nogil": True}


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of loops that are compiled, which they call."""
    code: Callable[..., Any] = njit(**OPTIONS)(function)
    return code


# An argument below gives a subnormal number, which is as good as zero.
_LEAST_EXPONENT = -87.0


def _bitcast(target: Any, signature: Any) -> Any:
    """An intrinsic's signature, and what makes its code."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], target)

    return signature, generate


def _generate_float(_context: Any, value: Any) -> Any:
    return _bitcast(ir.FloatType(), types.float32(types.uint32))


def _generate_bits(_context: Any, value: Any) -> Any:
    return _bitcast(ir.IntType(32), types.uint32(types.float32))


# Whose bits a uint32 is, and the bits of a float32.
_as_float: Any = intrinsic(_generate_float)
_as_bits: Any = intrinsic(_generate_bits)


@njit(inline="always")
def widened(half: Any) -> Any:
    """The float32 of a bfloat16's bits."""
    return _as_float(np.uint32(half) << np.uint32(16))


@njit(inline="always")
def rounded(value: Any) -> Any:
    """The bits of the nearest bfloat16, the even one of two; what is not a number stays so."""
    bits = _as_bits(np.float32(value))
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(0x7FC0) if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else np.uint16(nearest)


@njit(inline="always")
def exp(value: Any) -> Any:
    """Of a float32 of at most 0, within two units in the last place; what is not a number stays so.

    2**k times a polynomial in what is left, whose coefficients are those of Cephes' expf.
    """
    x = np.float32(_LEAST_EXPONENT) if value < np.float32(_LEAST_EXPONENT) else np.float32(value)
    k = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = _as_float(np.uint32(np.int32(k) + np.int32(127)) << np.uint32(23))
    return (p * r * r + r + np.float32(1.0)) * power


@njit(inline="always")
def _norm(values: Any, weight: Any, epsilon: Any, normed: Any) -> None:
    """Of a row, rounded before the weight is applied and after, as the models do; `normed` may be the row itself."""
    width = len(weight)
    squares = np.float32(0.0)
    for i in range(width):
        squares += widened(values[i]) * widened(values[i])
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + epsilon)
    for i in range(width):
        normed[i] = rounded(widened(rounded(widened(values[i]) * scale)) * widened(weight[i]))


def rms_norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """The norm of each of `[rows, width]`, to `out`."""
    for row in prange(x.shape[0]):
        _norm(x[row], weight, epsilon, out[row])


def add_rms_norm(x: Any, more: Any, weight: Any, epsilon: Any, total: Any, out: Any) -> None:
    """`x + more` to `total`, and as `rms_norm` of that to `out`; all `[rows, width]`."""
    rows, width = x.shape
    for row in prange(rows):
        values, others, sums = x[row], more[row], total[row]
        for i in range(width):
            sums[i] = rounded(widened(values[i]) + widened(others[i]))
        _norm(sums, weight, epsilon, out[row])


def silu_mul(gate_up: Any, out: Any) -> None:
    """`[rows, 2 * width]`, gates first, to silu(gate) * up in `[rows, width]`."""
    rows, width = out.shape
    for row in prange(rows):
        gates, ups, products = gate_up[row, :width], gate_up[row, width:], out[row]
        for i in range(width):
            gate = widened(gates[i])
            power = exp(-abs(gate))
            gated = rounded(gate * (np.float32(1.0) if gate >= 0 else power) / (np.float32(1.0) + power))
            products[i] = rounded(widened(gated) * widened(ups[i]))


def rotate(heads: Any, num_rotated: Any, cos: Any, sin: Any) -> None:
    """Rotates the first heads of `[rows, heads * head_dim]` in place; `cos` and `sin` are `[rows, head_dim]`."""
    rows, head_dim = cos.shape
    half = head_dim // 2
    for row in prange(rows):
        low_cos, high_cos, low_sin, high_sin = cos[row, :half], cos[row, half:], sin[row, :half], sin[row, half:]
        for head in range(num_rotated):
            first = head * head_dim
            low, high = heads[row, first : first + half], heads[row, first + half : first + head_dim]
            for i in range(half):
                a, b = widened(low[i]), widened(high[i])
                cos_a, sin_b = (
                    widened(rounded(a * widened(low_cos[i]))),
                    widened(rounded(b * widened(low_sin[i]))),
                )
                cos_b, sin_a = (
                    widened(rounded(b * widened(high_cos[i]))),
                    widened(rounded(a * widened(high_sin[i]))),
                )
                low[i], high[i] = rounded(cos_a - sin_b), rounded(cos_b + sin_a)


def norm_heads(heads: Any, first_head: Any, num_heads: Any, weight: Any, epsilon: Any) -> None:
    """As `rms_norm`, in place and for each of the heads in `[rows, heads * head_dim]` from `first_head` on."""
    head_dim = len(weight)
    for row in prange(heads.shape[0]):
        for head in range(first_head, first_head + num_heads):
            values = heads[row, head * head_dim : head * head_dim + head_dim]
            _norm(values, weight, epsilon, values)


def store(heads: Any, first_head: Any, keys: Any, values: Any, slots: Any) -> None:
    """Copies the keys, then the values, that begin at a head of `[rows, heads * head_dim]` to each row's own token of
    `keys` and `values` `[kv_heads, tokens, head_dim]`."""
    kv_heads, _, head_dim = keys.shape
    for row in prange(len(slots)):
        for head in range(kv_heads):
            first = (first_head + head) * head_dim
            then = first + kv_heads * head_dim
            key, value = keys[head, slots[row]], values[head, slots[row]]
            new_key, new_value = heads[row, first : first + head_dim], heads[row, then : then + head_dim]
            # One by one: to assign them at once takes two seconds to compile.
            for i in range(head_dim):
                key[i], value[i] = new_key[i], new_value[i]


@njit(inline="always")
def _score(asked: Any, keys: Any, scaling: Any, seen: Any, weights: Any) -> None:
    """Of `asked` `[group, head_dim]` against each of `keys` `[tokens, head_dim]`, into `weights` `[group, tokens]`."""
    for token in range(keys.shape[0]):
        for i in range(len(seen)):
            seen[i] = widened(keys[token, i])
        for g in range(asked.shape[0]):
            score = np.float32(0.0)
            for i in range(len(seen)):
                score += asked[g, i] * seen[i]
            weights[g, token] = score * scaling


@njit(inline="always")
def _largest(values: Any) -> Any:
    """Eight at a time: in one chain each would wait for the one before. What is not a number may be passed over."""
    parts = np.full(8, -np.inf, np.float32)
    whole = len(values) // 8 * 8
    for first in range(0, whole, 8):
        for i in range(8):
            value = values[first + i]
            parts[i] = value if value > parts[i] else parts[i]
    largest = np.float32(-np.inf)
    for i in range(8):
        largest = max(largest, parts[i])
    for i in range(whole, len(values)):
        largest = max(largest, values[i])
    return largest


@njit(inline="always")
def weigh(weights: Any) -> Any:
    """Makes weights of a row of scores, in place; returns their sum, by which they have yet to be divided.

    They are rounded to bfloat16 and their sum is not, as in torch's kernels: what comes out has mostly the same bits.
    """
    largest = _largest(weights)
    total = np.float32(0.0)
    for token in range(len(weights)):
        weight = exp(weights[token] - largest)
        total += weight
        weights[token] = widened(rounded(weight))
    return total


@njit(inline="always")
def _sum(weights: Any, values: Any, seen: Any, attended: Any) -> None:
    """Adds `values` `[tokens, head_dim]`, weighted, to `attended` `[group, head_dim]`."""
    for token in range(values.shape[0]):
        for i in range(len(seen)):
            seen[i] = widened(values[token, i])
        for g in range(attended.shape[0]):
            for i in range(len(seen)):
                attended[g, i] += weights[g, token] * seen[i]


def make_attend(head_dim: int, group: int) -> Any:
    """A loop that knows the size of a head, and how many heads share keys, when it is compiled."""

    def attend(query: Any, keys: Any, values: Any, rows: Any, begins: Any, ends: Any, scaling: Any, out: Any) -> None:
        """Each of these `rows` of `query` `[.., >= heads * head_dim]` attends to tokens `[begin, end)` of its own of
        `keys` and `values` `[kv_heads, tokens, head_dim]`. Fills these rows of `out` `[.., heads * head_dim]`."""
        kv_heads = keys.shape[0]
        for item in prange(len(rows) * kv_heads):
            index, head = item // kv_heads, item % kv_heads
            row, begin, end = rows[index], begins[index], ends[index]
            asked = np.empty((group, head_dim), np.float32)
            totals = np.empty(group, np.float32)
            seen = np.empty(head_dim, np.float32)
            weights = np.empty((group, end - begin), np.float32)
            attended = np.zeros((group, head_dim), np.float32)
            first = head * group * head_dim
            for g in range(group):
                for i in range(head_dim):
                    asked[g, i] = widened(query[row, first + g * head_dim + i])
            _score(asked, keys[head, begin:end], scaling, seen, weights)
            for g in range(group):
                totals[g] = weigh(weights[g])
            _sum(weights, values[head, begin:end], seen, attended)
            for g in range(group):
                for i in range(head_dim):
                    out[row, first + g * head_dim + i] = rounded(attended[g, i] * (np.float32(1.0) / totals[g]))

    return attend
