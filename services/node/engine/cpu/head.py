"""The LM head and the greedy choice as one compiled loop, on one core that has matrix units: logits are not kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.node.engine.cpu import tiles
from services.node.engine.cpu.attend import make_columns
from services.node.engine.cpu.loops import inner, rounded, widened

MAX_ROWS = tiles.TILE_ROWS


@inner
def _largest(sums: Any, row: Any) -> Any:
    """Of a row's 32 in `[32, 16]`; not a number, if any is none, or may be."""
    largest, traces = np.float32(-np.inf), np.float32(0.0)
    for place in range(row, 32 * 16 + row, 16):
        value = sums[place]
        largest = value if value > largest else largest
        traces += value * np.float32(0.0)
    return largest + traces


@inner
def _keep_larger(sums: Any, row: Any, first: Any, largest: Any, tokens: Any) -> None:
    """As the largest of a row, if one of its 32 is larger; what is not a number is larger than all."""
    for output in range(32):
        value = widened(rounded(sums[16 * output + row]))
        if value > largest[row] or (value != value and largest[row] == largest[row]):
            largest[row], tokens[row] = value, first + output


def make_greedy(version: int) -> Any:
    """The loop. `version` is that of the code that it is made of."""

    def greedy(weight: Any, rows: Any, largest: Any, tokens: Any) -> None:
        """Of the products of `weight` `[vocab, width]`, in no other order than an embedding's, with each of `rows`
        `[n, width]`, rounded to bfloat16, the largest, and the first that is as large. `n` is at most MAX_ROWS; what is
        not a number is the largest. Fills `largest` and `tokens` `[16]`."""
        assert version
        vocab_size, width = weight.shape
        memory, sums = weight.reshape(-1), np.empty(32 * 16, np.float32)
        columns = np.zeros(16 * width, np.uint16)
        make_columns(rows, 0, 1, width, columns)
        for row in range(16):
            largest[row], tokens[row] = -np.inf, 0
        tiles.configure((16, 16, 16, 16, 16, 16, 16, 16), (64, 64, 64, 64, 64, 64, 64, 64))
        for first in range(0, vocab_size, 32):
            place = first * width
            tiles.zero(0)
            tiles.zero(1)
            for i in range(0, width, 32):
                tiles.load(2, columns, 16 * i, 64)
                tiles.load(3, memory, place + i, 2 * width)
                tiles.load(4, memory, place + 16 * width + i, 2 * width)
                tiles.multiply(0, 3, 2)
                tiles.multiply(1, 4, 2)
            tiles.store(0, sums, 0, 64)
            tiles.store(1, sums, 256, 64)
            for row in range(len(rows)):
                # Of equals the first: what is no larger changes nothing, and after a while hardly anything is.
                if not _largest(sums, row) <= largest[row]:
                    _keep_larger(sums, row, first, largest, tokens)
        tiles.release()

    return greedy
