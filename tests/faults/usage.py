"""What processes hold of memory and of open files, over time: what leaks grows."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass

import psutil

from tests.faults.faulty_mesh import FaultyMesh

# A process fills its caches first.
WARM_SECONDS = 60.0
# Before that a line through samples says nothing.
MIN_SAMPLES = 8
MAX_BYTES_A_MINUTE = 2 << 20
# Or so much in all: in a few minutes a step is a slope.
BYTES_TO_SPARE = 48 << 20
FILES_TO_SPARE = 48


@dataclass(frozen=True, slots=True)
class Sample:
    """At `seconds` since the process was first seen."""

    seconds: float
    num_bytes: int
    num_files: int


class Usage:
    """Of the processes of a mesh, each as long as it lives."""

    def __init__(self, faulty: FaultyMesh) -> None:
        self._faulty = faulty
        self._first: dict[int, float] = {}
        self._names: dict[int, str] = {}
        self._samples: defaultdict[int, list[Sample]] = defaultdict(list)

    def sample(self) -> None:
        now = time.monotonic()
        for name, process in self._faulty.processes().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                seen = psutil.Process(process.process.pid)
                self._names[seen.pid] = name
                seconds = now - self._first.setdefault(seen.pid, now)
                self._samples[seen.pid].append(Sample(seconds, seen.memory_info().rss, seen.num_fds()))

    def growth(self) -> list[str]:
        """Of each process that holds ever more."""
        found = []
        for pid, samples in self._warm():
            slope = bytes_a_minute(samples)
            grown = samples[-1].num_bytes - samples[0].num_bytes
            if slope > MAX_BYTES_A_MINUTE and grown > BYTES_TO_SPARE:
                found.append(
                    f"{self._names[pid]} takes {slope / 2**20:.1f} MiB more a minute, {grown >> 20} MiB in all"
                )
            if samples[-1].num_files - samples[0].num_files > FILES_TO_SPARE:
                files = f"{samples[0].num_files}, then {samples[-1].num_files}"
                found.append(f"{self._names[pid]} has open files: {files}")
        return found

    def told(self) -> str:
        """A line for each process that lived long enough."""
        return "\n".join(
            f"{self._names[pid]} ({samples[-1].seconds / 60:.1f} min): {samples[0].num_bytes >> 20} to "
            f"{samples[-1].num_bytes >> 20} MiB, {bytes_a_minute(samples) / 2**20:+.2f} MiB a minute; "
            f"{samples[0].num_files} to {samples[-1].num_files} files"
            for pid, samples in self._warm()
        )

    def _warm(self) -> list[tuple[int, list[Sample]]]:
        warm = {pid: [s for s in samples if s.seconds >= WARM_SECONDS] for pid, samples in self._samples.items()}
        return [(pid, samples) for pid, samples in warm.items() if len(samples) >= MIN_SAMPLES]


def bytes_a_minute(samples: list[Sample]) -> float:
    """The slope of the line that fits samples best."""
    times, values = [s.seconds / 60 for s in samples], [s.num_bytes for s in samples]
    mean_time, mean_value = sum(times) / len(times), sum(values) / len(values)
    spread = sum((t - mean_time) ** 2 for t in times)
    return (
        sum((t - mean_time) * (v - mean_value) for t, v in zip(times, values, strict=True)) / spread if spread else 0.0
    )
