"""Weights in the order in which oneDNN packs them, as compiled loops take them."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from services.node.engine.cpu import layer, tiles
from services.node.engine.cpu.compiled import Bits, bits

# Rows of a weight that are compared at once: bounds the memory for it.
_PIECE_ROWS = 8 * layer.BLOCK


def packed_bits(packed: torch.Tensor, weight: torch.Tensor) -> Bits | None:
    """The memory of what oneDNN has made of `weight` `[out, in]`, bfloat16, if loops can multiply with it.

    In what order it packs is its own affair, and another one on other processors: so all of it is looked at.
    """
    num_out, num_in = weight.shape
    if not tiles.are_filled_by(num_out, num_in) or int(torch.ops.mkldnn._nbytes(packed)) != weight.nbytes:
        return None
    memory = (ctypes.c_uint16 * weight.numel()).from_address(int(torch.ops.mkldnn.data_ptr(packed)))
    found: Bits = np.ctypeslib.as_array(memory)
    for first in range(0, num_out, _PIECE_ROWS):
        rows = bits(weight[first : first + _PIECE_ROWS].contiguous())
        wanted = rows.reshape(-1, layer.BLOCK, num_in // 2, 2).transpose(0, 2, 1, 3)
        if not np.array_equal(found[first * num_in :][: rows.size].reshape(wanted.shape), wanted):
            return None
    return found
