"""What is free of this machine's memory for this process: what nobody uses, within the limits of its control groups.

In a container the machine's own figures say nothing of how much the container may take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

ROOT = Path("/")
_MEMBERSHIP, _MOUNTS, _STATISTICS = "proc/self/cgroup", "proc/self/mountinfo", "memory.stat"
# Counts as used and is given up when memory is short. Version 1 has the sums with the groups inside under other names.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_WITH_CHILDREN = "total_"


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of one version's files. In version 1 a group without a limit has one larger than any machine."""

    mount_type: str
    limits: tuple[str, ...]
    usage: str


_VERSIONS = (
    _Version("cgroup", ("memory.limit_in_bytes",), "memory.usage_in_bytes"),
    _Version("cgroup2", ("memory.max", "memory.high"), "memory.current"),
)


def free_host_bytes(root: Path = ROOT) -> int:
    """What this process could take now. `root` is where /proc and /sys are."""
    return max(0, min([psutil.virtual_memory().available, *group_rooms(root)]))


def group_rooms(root: Path = ROOT) -> list[int]:
    """What the limits of each control group of this process leave, from the innermost outwards; negative where one is
    exceeded. Empty where there are no limits, or none that can be read."""
    rooms = []
    for version in _VERSIONS:
        for folder in _groups(root, version):
            limits = [_number(folder / name) for name in version.limits]
            stated = [limit for limit in limits if limit is not None]
            used = _number(folder / version.usage)
            if stated and used is not None:
                rooms.append(min(stated) - used + min(used, _reclaimable(folder)))
    return rooms


def _groups(root: Path, version: _Version) -> Iterator[Path]:
    """The folder of the process's group, and those of all groups around it that are visible here."""
    path, mount = _path(root, version), _mount(root, version)
    if path is None or mount is None:
        return
    top, visible = mount
    # Of a container that sees its own part of the tree only, paths may begin outside, or lead there.
    inside = path.relative_to(visible) if path.is_relative_to(visible) and ".." not in path.parts else PurePosixPath()
    folder = top / inside
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _path(root: Path, version: _Version) -> PurePosixPath | None:
    """Of the process's group in its tree: lines `number:controllers:path`, in version 2 without controllers."""
    for line in _lines(root / _MEMBERSHIP):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path and ("memory" in controllers.split(",") if version.mount_type == "cgroup" else not controllers):
            return PurePosixPath(path)
    return None


def _mount(root: Path, version: _Version) -> tuple[Path, PurePosixPath] | None:
    """Where a tree is mounted, and which of its groups is the top one there.

    Lines `id parent device root mount-point options ... - type source super-options`.
    """
    for line in _lines(root / _MOUNTS):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3 or kinds[0] != version.mount_type:
            continue
        if version.mount_type == "cgroup2" or "memory" in kinds[2].split(","):
            return root / fields[4].lstrip("/"), PurePosixPath(fields[3])
    return None


def _reclaimable(folder: Path) -> int:
    statistics = dict(line.split(maxsplit=1) for line in _lines(folder / _STATISTICS) if " " in line)
    values = [statistics.get(f"{_WITH_CHILDREN}{name}", statistics.get(name, "0")) for name in _RECLAIMABLE]
    return sum(int(value) for value in values if value.isdecimal())


def _number(file: Path) -> int | None:
    """None: there is no such file, or it says `max`."""
    text = "".join(_lines(file)[:1]).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
