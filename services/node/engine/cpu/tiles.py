"""The matrix units of Intel's processors (AMX) as compiled loops use them.

There are eight tiles of up to 16 rows of 64 bytes. `multiply` adds to tile C (float32 `[rows, 16]`) the product of tile
A (bfloat16 `[rows, 32]`) and tile B (bfloat16 `[16, 16, 2]`: of 32 rows each two, side by side). A tile has as many
rows, and bytes in a row, as `configure` has said last; another thread has tiles of its own.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

NUM_TILES = 8
TILE_ROWS = 16
# Values of 16 bits in a row.
TILE_VALUES = 32
# Values of 16 bits that memory brings at once.
LINE_VALUES = 32

_FEATURES = ("amx-tile", "amx-bf16")
# Linux' arch_prctl, its question for leave to use a part of a processor's state, and that part: the tiles' memory.
_ARCH_PRCTL, _REQUEST_STATE, _TILE_STATE = 158, 0x1023, 18
cgutils: Any = _cgutils
_BYTE, _INT, _LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_POINTER = _BYTE.as_pointer()


@functools.cache
def are_available() -> bool:
    """Whether this process may use tiles. Asks the system for leave to."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not all(features.get(feature) for feature in _FEATURES):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_STATE) == 0)


def are_filled_by(*sizes: int) -> bool:
    """Whether this process may use tiles, and heads, linear layers or vocabularies of these sizes leave none half
    empty."""
    return are_available() and not any(size % TILE_VALUES for size in sizes)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}"), arguments)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _POINTER)


def _on_tiles(name: str, count: int) -> Any:
    """An intrinsic that takes so many numbers of tiles, constants all, and nothing else."""

    def generate(_context: Any, *tiles: Any) -> Any:
        numbers = [_BYTE(tile.literal_value) for tile in tiles]

        def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            _call(builder, name, *numbers)
            return context.get_dummy_value()

        return types.void(*tiles), code

    signatures: dict[int, Any] = {
        0: lambda context: generate(context),
        1: lambda context, tile: generate(context, tile),
        3: lambda context, c, a, b: generate(context, c, a, b),
    }
    return intrinsic(prefer_literal=True)(signatures[count])


def _with_memory(name: str) -> Any:
    """An intrinsic of a tile, an array, the index at which its first row lies there, and bytes from row to row."""

    def generate(_context: Any, tile: Any, array: Any, index: Any, stride: Any) -> Any:
        number = _BYTE(tile.literal_value)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, memory, first, step = arguments
            step = context.cast(builder, step, signature.args[3], types.int64)
            _call(builder, name, number, _address(context, builder, signature.args[1], memory, first), step)
            return context.get_dummy_value()

        return types.void(tile, array, types.intp, types.int64), code

    return intrinsic(prefer_literal=True)(generate)


load: Any = _with_memory("x86.tileloadd64")
store: Any = _with_memory("x86.tilestored64")
zero: Any = _on_tiles("x86.tilezero", 1)
multiply: Any = _on_tiles("x86.tdpbf16ps", 3)
release: Any = _on_tiles("x86.tilerelease", 0)


def _generate_configure(_context: Any, description: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _call(builder, "x86.ldtilecfg", _address(context, builder, signature.args[0], arguments[0], _LONG(0)))
        return context.get_dummy_value()

    return types.void(description), code


_configure: Any = intrinsic(_generate_configure)


def _generate_prefetch(_context: Any, array: Any, index: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature.args[0], *arguments)
        # To be read, into all caches, as data.
        _call(builder, "prefetch.p0i8", address, _INT(0), _INT(3), _INT(1))
        return context.get_dummy_value()

    return types.void(array, types.intp), code


# Of the cache line at an index, which may lie behind the array's end.
prefetch: Any = intrinsic(_generate_prefetch)


_HALVES, _MERGED = ir.VectorType(ir.IntType(16), 32), ir.VectorType(ir.IntType(16), 64)
_SIDE_BY_SIDE = ir.Constant(ir.VectorType(_INT, 64), [i // 2 + 32 * (i % 2) for i in range(64)])


def _generate_interleave(_context: Any, low: Any, low_at: Any, high: Any, high_at: Any, to: Any, to_at: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = [_address(context, builder, signature.args[i], arguments[i], arguments[i + 1]) for i in (0, 2, 4)]
        parts = [builder.load(builder.bitcast(place, _HALVES.as_pointer()), align=2) for place in places[:2]]
        merged = builder.shuffle_vector(*parts, _SIDE_BY_SIDE)
        builder.store(merged, builder.bitcast(places[2], _MERGED.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(low, types.intp, high, types.intp, to, types.intp), code


# Of two arrays of 16 bits, each with an index, 32 values from there on, side by side, to a third: two rows of tile B.
interleave: Any = intrinsic(_generate_interleave)


@njit(inline="always")
def configure(rows: Any, row_bytes: Any) -> None:
    """Gives each tile so many rows, and so many bytes in a row. What is in them is lost."""
    description = np.zeros(64, np.uint8)
    description[0] = 1
    for tile in range(NUM_TILES):
        description[16 + 2 * tile] = row_bytes[tile]
        description[48 + tile] = rows[tile]
    _configure(description)
