"""Every fault at every place at every moment of a stream: what the streams notice of it, in a table.

    python -m tests.faults.matrix [--only 'middle/*/kill/*'] [--table FILE]

A cell is PLACE/PHASE/FAULT/SESSIONS. The mesh: six nodes of a tiny Llama, three stages with a replica each, of which
the first is the entry node; tracker and gateway; proxies before all. Kill and stop (SIGSTOP) befall processes; reset,
stall and corrupt the connections to them: frames at a stage, prompts at the entry node, gRPC at the tracker. A cell
passes if all streams get the tokens that they get undisturbed, nothing is left over on any node, and no log has an
error that it should not have. Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from tests.e2e.mesh import NodeSpec
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.faults.cells import NUM_SESSIONS, Cell, Fault, Matrix, Outcome, Phase, Place, all_cells, chosen
from tests.faults.faulty_mesh import FaultyMesh, faulty_mesh
from tests.parity import Reference

MODEL = "tiny"
CONTEXT = 4096
# The same prompts come again and again, and should be computed each time.
NO_REUSE = ("--no-prefix-reuse",)
LEASE_SECONDS = 3.0
TRACKER_OPTIONS = ("--heartbeat", "0.5", "--lease", f"{LEASE_SECONDS:g}")


@contextlib.contextmanager
def matrix_of(folder: Path, console: Console | None = None) -> Iterator[Matrix]:
    """On a mesh of its own, whose files are in the folder."""
    weights = save_tiny_llama(folder, context_length=CONTEXT, vocabulary=True)
    with three_stages(weights, console.print if console else str) as faulty:
        yield Matrix(faulty, Reference(weights))


def three_stages(
    weights: Path, say: Callable[[str], object] = str, *, reuse: bool = False
) -> contextlib.AbstractContextManager[FaultyMesh]:
    """The mesh. `reuse`: nodes keep what they have computed for prompts that begin in the same way."""
    specs = [NodeSpec(i, room_for(2), tracker_node=i == "a", options=() if reuse else NO_REUSE) for i in "abcdef"]
    return faulty_mesh(
        [f"{MODEL}={weights}"], specs, model_id=MODEL, kv_tokens=KV_TOKENS, tracker_options=TRACKER_OPTIONS, say=say
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="Cells, with * for any part; repeatable.")
    parser.add_argument("--table", type=Path, help="File for the table, in Markdown.")
    arguments = parser.parse_args()
    cells = chosen(all_cells(), arguments.only)
    if not cells:
        raise SystemExit(f"no cell is {' or '.join(arguments.only)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHNET_CACHE_DIR"] = folder
        outcomes = _run(cells, Path(folder) / "weights", console)
    text = table(outcomes)
    console.print(text)
    if arguments.table:
        arguments.table.write_text(text + "\n")
    failed = [outcome for outcome in outcomes if outcome.failures]
    console.print(f"{len(outcomes) - len(failed)} of {len(cells)} cells passed")
    sys.exit(1 if failed or len(outcomes) < len(cells) else 0)


def _run(cells: Sequence[Cell], weights: Path, console: Console) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with matrix_of(weights, console) as matrix, console.status("") as status:
        for number, cell in enumerate(cells, 1):
            status.update(f"{number} of {len(cells)}: {cell}")
            try:
                outcomes.append(matrix.run(cell))
            except AssertionError as error:
                # The mesh is not what the next cell needs.
                console.print(f"gave up after {cell}: {error}")
                return outcomes
            console.print(told(outcomes[-1]))
    return outcomes


def told(outcome: Outcome) -> str:
    """One line."""
    said = f"FAILED: {outcome.failure}" if outcome.failures else "ok"
    pause, noticed = _seconds(outcome.pause_seconds), _seconds(outcome.noticed_seconds)
    flips = f", {outcome.flips} other tokens" if outcome.flips else ""
    return f"{outcome.cell}: pause {pause}, noticed after {noticed}{flips}, {outcome.seconds:.0f} s in all: {said}"


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each place and fault, a column for each moment and number of sessions; below it what failed."""
    by_cell = {outcome.cell: outcome for outcome in outcomes}
    columns = [(phase, count) for phase in get_args(Phase) for count in NUM_SESSIONS]
    heads = [f"{phase.replace('-', ' ')}, {count}" for phase, count in columns]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(columns)]
    for place in get_args(Place):
        for fault in get_args(Fault):
            found = [by_cell.get(Cell(place, phase, fault, count)) for phase, count in columns]
            if any(found):
                lines.append(f"| {place}: {fault} | " + " | ".join(map(_in_table, found)) + " |")
    lines += ["", *[f"- {outcome.cell}: {outcome.failure}" for outcome in outcomes if outcome.failures]]
    return "\n".join(lines).rstrip()


def _in_table(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    pause = _seconds(outcome.pause_seconds)
    return f"**failed** ({pause})" if outcome.failures else pause


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    main()
