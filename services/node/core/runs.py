"""In which pieces the tensors of a shard are fetched. Pure; offsets and sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Tensors that lie side by side come as one piece up to this size: a check and a change of source are never far away.
RUN_BYTES = 16 << 20
RUN_TENSORS = 2000


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies in its file, less the first bytes of it that are there already."""

    name: str
    file: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes `[begin, end)` of one file: the tensors in them, without a gap."""

    file: str
    begin: int
    end: int
    extents: tuple[Extent, ...]


def plan_runs(extents: Iterable[Extent], run_bytes: int = RUN_BYTES) -> tuple[Run, ...]:
    """The fewest that hold all of these and no other bytes, none longer than `run_bytes` or its one tensor."""
    runs: list[Run] = []
    for extent in sorted(extents, key=lambda e: (e.file, e.begin, e.end)):
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.file, last.end) == (extent.file, extent.begin)
            and extent.end - last.begin <= run_bytes
            and len(last.extents) < RUN_TENSORS
        ):
            runs[-1] = Run(last.file, last.begin, extent.end, (*last.extents, extent))
        else:
            runs.append(Run(extent.file, extent.begin, extent.end, (extent,)))
    return tuple(runs)
