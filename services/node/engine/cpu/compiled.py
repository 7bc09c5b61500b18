"""The loops as machine code, which is kept on disk between runs where that can be written."""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import float32, int64, njit, set_num_threads, uint16, void

from services.node.engine.cpu import attend, head, layer, loops, tiles

_config: Any = numba.config
_types: Any = numba.types
_ROW, _ROWS, _HEADS, _TOKENS = uint16[::1], uint16[:, ::1], uint16[:, :, ::1], int64[::1]
_SIGNATURES = {
    "rms_norm": void(_ROWS, _ROW, float32, _ROWS),
    "add_rms_norm": void(_ROWS, _ROWS, _ROW, float32, _ROWS, _ROWS),
    "silu_mul": void(_ROWS, _ROWS),
    "rotate": void(_ROWS, int64, _ROWS, _ROWS),
    "norm_heads": void(_ROWS, int64, int64, _ROW, float32),
    "store": void(_ROWS, int64, _HEADS, _HEADS, _TOKENS),
}
_TABLE, _SIZES = int64[:, ::1], _types.UniTuple(int64, 4)
_LAYERS = void(_ROWS, _TABLE, float32[:, ::1], float32[::1], _SIZES, _ROWS, _ROWS, _TABLE, _TABLE, _ROWS)
_GREEDY = void(_ROWS, _ROWS, float32[::1], int64[::1])
_ATTEND = void(_ROWS, _HEADS, _HEADS, _TOKENS, _TOKENS, _TOKENS, float32, _ROWS)

Loop = Callable[..., None]
Bits = np.ndarray[Any, np.dtype[np.uint16]]


def loop(name: str) -> Loop:
    """One of the loops, compiled for as many threads as torch has."""
    return _loop(name, torch.get_num_threads())


def attend_loop(head_dim: int, group: int) -> Loop:
    """The loop of attention for heads of this size, `group` of which share keys."""
    return _attend_loop(head_dim, group, torch.get_num_threads())


@functools.cache
def layers_loop() -> Loop:
    """The loop of consecutive layers, for one thread."""
    return _compiled(layer.make_layers(_version()), _LAYERS, threads=1)


@functools.cache
def greedy_loop() -> Loop:
    """The loop of an LM head and the greedy choice, for one thread."""
    return _compiled(head.make_greedy(_version()), _GREEDY, threads=1)


def bits(tensor: torch.Tensor) -> Bits:
    """A bfloat16 tensor's own memory as loops take it."""
    array: Bits = tensor.view(torch.uint16).numpy()
    return array


@functools.cache
def _loop(name: str, threads: int) -> Loop:
    return _compiled(getattr(loops, name), _SIGNATURES[name], threads)


@functools.cache
def _attend_loop(head_dim: int, group: int, threads: int) -> Loop:
    return _compiled(loops.make_attend(head_dim, group), _ATTEND, threads)


@functools.cache
def _version() -> int:
    """Of the code that loops of several files are made of: what is kept on disk is stale only when its own changes."""
    sources = (Path(module.__file__ or "").read_bytes() for module in (loops, layer, attend, head, tiles))
    return zlib.crc32(b"".join(sources))


def _compiled(function: Callable[..., None], signature: Any, threads: int) -> Loop:
    """At once and for these types only: no step waits for a compiler."""
    parallel = threads > 1
    if parallel:
        # The one that is always there. It lets one thread call at a time.
        _config.THREADING_LAYER = "workqueue"
    try:
        code: Loop = njit(signature, cache=True, parallel=parallel, **loops.OPTIONS)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        # There is no place on disk for it.
        code = njit(signature, parallel=parallel, **loops.OPTIONS)(function)
    return _in_turn(code, threads) if parallel else code


_turn = threading.Lock()


def _in_turn(code: Loop, threads: int) -> Loop:
    def call(*arguments: Any) -> None:
        with _turn:
            set_num_threads(min(threads, _config.NUMBA_NUM_THREADS))
            code(*arguments)

    return call
