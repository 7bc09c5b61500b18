"""What a device is, what is free of its memory, and what a step takes of it."""

from __future__ import annotations

import ctypes
import importlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.node.files.host_memory import free_host_bytes

_CPU_INFO = Path("/proc/cpuinfo")


def machine_name(device: torch.device) -> str:
    """The device and what it is, for example `cuda:0 (NVIDIA H200)`."""
    return f"{device} ({torch.cuda.get_device_name(device) if device.type == 'cuda' else _cpu_name()})"


def _cpu_name() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def free_bytes(device: torch.device) -> int:
    """Memory that nobody uses now; what torch only keeps for its next tensors counts as free. On a
    CPU what this process's control groups leave."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_bytes()


def give_back() -> None:
    """Gives to the system what the C library only keeps for its next allocations, if it is one that can.

    Weights are read and converted in pieces that come and go between those that stay, which leaves it a lot.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; for the CPU torch has no error class of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def peak_bytes(device: torch.device, function: Callable[[], object]) -> int | None:
    """Runs a function. Returns the most bytes that it had allocated at once; None: this torch does not tell."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return _cpu_peak_bytes(function)


def _cpu_peak_bytes(function: Callable[[], object]) -> int | None:
    """Of torch's allocations in this thread. The growth of the process would miss memory that is used again.

    The newer profiler records the same, and writes to standard error whenever it starts.
    """
    profiler: Any = importlib.import_module("torch.autograd.profiler_legacy")
    start, stop = (getattr(profiler, name, None) for name in ("_enable_profiler_legacy", "_disable_profiler_legacy"))
    if start is None or stop is None:
        function()
        return None
    options = torch._C._profiler._ExperimentalConfig()
    start(profiler.ProfilerConfig(profiler.ProfilerState.CPU, False, True, False, False, False, options))
    try:
        function()
    finally:
        threads: list[list[Any]] = stop()
    peak = live = 0
    for record in (record for records in threads for record in records):
        if record.kind() == "memory_alloc":
            live += record.cpu_memory_usage()
            peak = max(peak, live)
    return peak
