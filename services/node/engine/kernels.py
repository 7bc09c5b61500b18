"""Bounds on what torch's kernels keep and take of memory on a CPU, beside tensors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, pad

from services.node.core.batching import BLOCK_ROWS
from services.node.core.workspace import HEAD_PIECE_VALUES
from services.node.engine.cpu import head, tiles
from services.node.engine.cpu.compiled import bits, greedy_loop

# oneDNN compiles a kernel for each shape, which takes about 0.8 MB, and keeps 1024 of them unless told.
NUM_KERNELS = 128
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# More rows are filled up to a multiple, so that few shapes occur; matrix units take so many at once anyway.
_ROWS = 16
# Of a prompt beside those that decode: with 16 of those they are still few enough for the loops of whole layers.
_FEW_PROMPT_ROWS = 12
_MANY_ROWS = 512
# Up to so many rows an LM head of any width is multiplied without a copy of it.
_FEW_ROWS = 64
# glibc's mallopt: allocations of this size and more are memory of their own, given back when freed; what is free at the
# end of the rest is given back from so many bytes on. While weights are loaded almost all are, or else those that stay
# would leave holes between them that fill up later. Steps would be slower so.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_STEP_MAPPED_BYTES, _LOAD_MAPPED_BYTES, _TRIMMED_BYTES = 4 << 20, 128 << 10, 16 << 20


def bound_memory() -> None:
    """For the whole process, before torch has run anything. What the environment says already is left as it is."""
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(NUM_KERNELS))
    _set_malloc(_M_TRIM_THRESHOLD, _TRIMMED_BYTES)
    _set_malloc(_M_MMAP_THRESHOLD, _STEP_MAPPED_BYTES)


@contextmanager
def loading() -> Iterator[None]:
    """What is allocated meanwhile leaves no holes when it is freed."""
    _set_malloc(_M_MMAP_THRESHOLD, _LOAD_MAPPED_BYTES)
    try:
        yield
    finally:
        _set_malloc(_M_MMAP_THRESHOLD, _STEP_MAPPED_BYTES)


def _set_malloc(option: int, value: int) -> None:
    """Where the C library is one that can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


def padded(rows: torch.Tensor) -> torch.Tensor:
    """`[n, width]`, or with a leading 1, with rows of zeros up to one of the counts that kernels are kept for.

    Where there are no matrix units a single row gets another one: oneDNN multiplies it by kernels of their own, which
    round otherwise than those for several, and what comes out would depend on who else is in the step. They are no
    faster.
    """
    count = rows.shape[-2]
    more = -count % _ROWS if count > _ROWS else int(count == 1 and not tiles.are_available())
    return pad(rows, (0, 0, 0, more)) if more else rows


def attended_rows(device: torch.device) -> int:
    """Rows of a long prompt that are attended for at once: bounds the mask, and skips keys that lie after them all.

    On processors without matrix units torch's attention rounds a row otherwise with each number of rows: of a prompt of
    300 tokens one value in 400 is another if it comes in chunks of 12. In blocks it is the same however it comes.
    """
    return BLOCK_ROWS if device.type == "cpu" and not tiles.are_available() else _MANY_ROWS


def busy_chunk_tokens(device: torch.device) -> int:
    """How many tokens of a prompt go into a step of sessions that decode.

    With 16 tokens of others behind a prompt of 4,000 such a step takes twice as long as without. Loops that run whole
    layers on matrix units take no more than so few, and round them as attention of many rows does there.
    """
    return _FEW_PROMPT_ROWS if device.type == "cpu" and tiles.are_available() else BLOCK_ROWS


class TiedHead(nn.Module):
    """An LM head without bias that shares the embedding's `weight` `[vocab, hidden]`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        one_core = weight.device.type == "cpu" and torch.get_num_threads() == 1
        is_possible = one_core and weight.dtype is torch.bfloat16 and tiles.are_filled_by(*weight.shape)
        self._greedy = greedy_loop() if is_possible else None

    def greedy(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of `[rows, hidden]` the largest logit of each, and the first token that has it. None: it takes the logits."""
        if self._greedy is None or len(rows) > head.MAX_ROWS:
            return None
        largest, tokens = np.empty(head.MAX_ROWS, np.float32), np.empty(head.MAX_ROWS, np.int64)
        self._greedy(bits(self.weight.detach()), bits(rows.contiguous()), largest, tokens)
        return torch.from_numpy(largest[: len(rows)]), torch.from_numpy(tokens[: len(rows)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.weight.device.type != "cpu" or self.weight.dtype is torch.float32:
            return linear(hidden, self.weight)
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = self._few(rows) if len(rows) <= _FEW_ROWS else self._many(rows)
        return logits.view(*hidden.shape[:-1], -1)

    def _few(self, rows: torch.Tensor) -> torch.Tensor:
        """The weights come first: what comes second is what the kernels bring into another order, each time."""
        # A single one would be multiplied by kernels for vectors, which are slower.
        filled = pad(rows, (0, 0, 0, 1)) if len(rows) == 1 else padded(rows)
        return torch.mm(self.weight, filled.t())[:, : len(rows)].t()

    def _many(self, rows: torch.Tensor) -> torch.Tensor:
        """In pieces, since torch makes a copy of what it multiplies with so many rows."""
        logits = rows.new_empty(len(rows), len(self.weight))
        end = 0
        for piece in torch.split(self.weight, max(1, HEAD_PIECE_VALUES // self.weight.shape[1])):
            begin, end = end, end + len(piece)
            logits[:, begin:end] = linear(rows, piece)
        return logits
