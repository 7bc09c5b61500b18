"""How wrong `meshnet estimate` is: SmolLM2-135M in bfloat16 on nodes of one thread each, on this machine.

    python -m benchmarks.estimate_error

First what the estimate needs is measured (steps of the whole model in one process, alone and on all cores at once; and
stubs, for all that is not computing), then real meshes, in turn and several times, so that what else the machine does
falls on both. The medians of the first are what the estimate is made from; those of the second it is compared with.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.estimate_error.calibration import (
    Calibration,
    calibrate,
    frames_of,
    median_bare,
    median_calibration,
    num_cores,
    spec_of,
    surroundings_of,
)
from benchmarks.estimate_error.meshes import LONG_PROMPT, SESSIONS, Bare, Measured, measure, measure_bare, mesh_of
from benchmarks.estimate_error.steps import CACHED, Worker
from benchmarks.streams import MODEL
from meshnet.estimate.mesh import Questions, Surroundings, estimate
from meshnet.topology import Topology

LARGEST_ERROR = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    num_nodes: int
    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,2,4", help="Numbers of nodes, with commas; 1 is needed.")
    parser.add_argument("--rounds", type=int, default=3, help="Of all measurements in turn; about four minutes each.")
    arguments = parser.parse_args()
    counts = sorted({1, *map(int, arguments.nodes.split(","))})
    console = Console(highlight=False)

    # Told to end, it ends the meshes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    calibrations: list[Calibration] = []
    bare: dict[int, list[Bare]] = {count: [] for count in counts}
    measured: dict[int, list[Measured]] = {count: [] for count in counts}
    topologies: dict[int, Topology] = {}
    for number in range(arguments.rounds):
        for count in counts:
            console.print(f"round {number + 1} of {arguments.rounds}, {count} nodes", style="dim")
            calibrations.append(_calibrate())
            with mesh_of(count, stub=True) as (mesh, _):
                bare[count].append(measure_bare(mesh))
            with mesh_of(count) as (mesh, topologies[count]):
                measured[count].append(measure(mesh))
            console.print(f"{measured[count][-1]}", style="dim", soft_wrap=True)
    calibration = median_calibration(calibrations)
    frames = {count: median_bare(found) for count, found in bare.items()}
    _say_calibration(console, calibration, frames, topologies[1])
    rows = [
        row
        for count in counts
        for row in _rows(
            count,
            topologies[count],
            surroundings_of(topologies[count], topologies[count].models[MODEL].manifest, calibration, frames),
            measured[count],
        )
    ]
    _say_rows(console, rows)


def _calibrate() -> Calibration:
    with ExitStack() as stack:
        return calibrate([stack.enter_context(Worker()) for _ in range(num_cores())])


def _rows(count: int, topology: Topology, surroundings: Surroundings, measured: Sequence[Measured]) -> Iterator[Row]:
    # Half of the new tokens count as cached: none here, for steps were timed with all that are.
    questions = Questions(prompts=(LONG_PROMPT,), streams=(1, SESSIONS), new_tokens=2 * CACHED)
    told = estimate(topology, MODEL, surroundings, questions)
    for stated in told.streams:
        assert stated.at_once == stated.num_streams, "the mesh has room for all streams"
    single, many = (stated.tokens_per_second for stated in told.streams)
    yield Row(count, "1 stream, tokens/s", single, statistics.median(found.single for found in measured))
    yield Row(count, f"{SESSIONS} streams, tokens/s", many, statistics.median(found.many for found in measured))
    first = statistics.median(found.first_token for found in measured)
    predicted = told.prompts[0].first_token_seconds
    yield Row(count, f"prompt of {LONG_PROMPT}, tokens/s", LONG_PROMPT / predicted, LONG_PROMPT / first)


def _say_calibration(console: Console, calibration: Calibration, bare: Mapping[int, Bare], topology: Topology) -> None:
    steps = Table("step", "alone, ms", "on all cores at once, ms", title="Steps of the whole model")
    for command, seconds in calibration.alone.items():
        other = calibration.together.get(command)
        steps.add_row(command, f"{1000 * seconds:.1f}", "" if other is None else f"{1000 * other:.1f}")
    console.print(steps)
    stubs = Table("nodes", "1 stream, ms", f"{SESSIONS} streams, ms", "CPU, ms", title="Stubs, for each token")
    for count, found in bare.items():
        stubs.add_row(str(count), *(f"{1000 * value:.2f}" for value in (found.single, found.many, found.cpu)))
    console.print(stubs)
    frames = frames_of(bare)
    console.print(
        f"frames: {1000 * frames.step:.2f} ms a step, {1000 * frames.row:.2f} ms a row, {1000 * frames.hop:.2f} ms a "
        f"hop, {1000 * frames.aside:.2f} ms a token aside"
    )
    console.print(f"--node {spec_of(calibration, topology.models[MODEL].manifest)}\n", soft_wrap=True)


def _say_rows(console: Console, rows: Sequence[Row]) -> None:
    table = Table("nodes", "what", "predicted", "measured", "error", title="meshnet estimate")
    for row in rows:
        numbers = (f"{row.predicted:.1f}", f"{row.measured:.1f}", f"{row.error:+.0%}")
        table.add_row(str(row.num_nodes), row.what, *numbers, style="red" if abs(row.error) > LARGEST_ERROR else None)
    console.print(table)
    worst = max(abs(row.error) for row in rows)
    console.print(f"worst error {worst:.0%}; {LARGEST_ERROR:.0%} is what it should be at most")


if __name__ == "__main__":
    main()
