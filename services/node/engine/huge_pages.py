"""Large pages for what every step reads: where memory is read once a step, looking up small pages takes as long."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import nn

from services.node.engine.linear import PackedLinear

# Ranges of bytes, each from its first on to the one behind its last.
Range = tuple[int, int]

_HUGE = 2 << 20
# What the C library puts between two allocations, and the rest of a page.
_GAP = 64 << 10
# Linux' madvise: use large pages from now on; make those that are there large (Linux 6.1).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def use_for(modules: Iterable[nn.Module]) -> int:
    """Moves the weights of modules on the CPU into large pages, as far as they lie side by side.

    Returns bytes. Where the system has none, or no memory for them, all stays as it is.
    """
    return sum(_advise(each, _MADV_HUGEPAGE, _MADV_COLLAPSE) for each in merged(_ranges(modules)))


def use_when_touched(memory: torch.Tensor) -> None:
    """Makes the pages of a tensor on the CPU that nothing was written to yet large."""
    if memory.device.type == "cpu":
        _advise((memory.data_ptr(), memory.data_ptr() + memory.nbytes), _MADV_HUGEPAGE)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Those side by side as one, in order."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin - found[-1][1] <= _GAP:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _ranges(modules: Iterable[nn.Module]) -> list[Range]:
    found: list[Range] = []
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, PackedLinear):
            begin = int(torch.ops.mkldnn.data_ptr(part.packed))
            found.append((begin, begin + int(torch.ops.mkldnn._nbytes(part.packed))))
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if tensor.device.type == "cpu" and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found


def _advise(memory: Range, *advices: int) -> int:
    """Bytes of the whole large pages in a range for which the system has taken all of the advice."""
    begin, end = -(-memory[0] // _HUGE) * _HUGE, memory[1] // _HUGE * _HUGE
    if begin >= end or sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return end - begin if all(madvise(begin, end - begin, advice) == 0 for advice in advices) else 0
