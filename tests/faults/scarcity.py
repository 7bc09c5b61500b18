"""Machines that run out of something: memory, or room on the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")


def limited_memory(num_bytes: int) -> tuple[str, ...]:
    """Before a command: allocations of its process fail beyond so many bytes of address space (RLIMIT_AS)."""
    return "prlimit", f"--as={num_bytes}"


def missing_for_limited_memory() -> str:
    return "" if shutil.which("prlimit") else "needs the command prlimit"


def missing_for_oom_kills() -> str:
    """Why the kernel cannot be made to kill a process for its memory here; empty if it can."""
    if os.geteuid() or not os.access(MEMORY_CGROUP / "cgroup.procs", os.W_OK):
        return "needs root, and the memory controller of cgroups v1 at /sys/fs/cgroup/memory"
    return ""


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A cgroup of its own. What is in it when this ends must have ended before."""
    group = MemoryGroup(MEMORY_CGROUP / f"meshnet-{os.getpid()}-{os.urandom(4).hex()}")
    group.path.mkdir()
    try:
        yield group
    finally:
        group.path.rmdir()


class MemoryGroup:
    """Processes that together may hold so much memory. Beyond that the kernel kills the largest."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command, starts it in the group."""
        return "sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh"

    @property
    def num_bytes(self) -> int:
        """That are held now."""
        return int((self.path / "memory.usage_in_bytes").read_text())

    def limit(self, num_bytes: int) -> None:
        (self.path / "memory.limit_in_bytes").write_text(str(num_bytes))


def missing_for_small_disks() -> str:
    """Why there can be no file system of a given size here; empty if there can."""
    if os.geteuid() or not shutil.which("mount"):
        return "needs root, and the command mount"
    probe = [sys.executable, "-c", "pass"]
    done = subprocess.run(["unshare", "--mount", *probe], check=False, capture_output=True)
    return "" if done.returncode == 0 else "mounts are not possible here"


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of so many bytes at an empty folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
