"""A sample of the matrix: each place, moment and fault at least once. The rest: `python -m tests.faults.matrix`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cells import NUM_SESSIONS, Cell, Matrix, Outcome, all_cells, chosen
from tests.faults.matrix import matrix_of, table

SAMPLE = [
    Cell("last", "prefill", "kill", 1),
    Cell("first", "first-token", "reset", 8),
    Cell("middle", "mid-decode", "kill", 8),
    Cell("entry", "mid-decode", "kill", 1),
    Cell("middle", "mid-decode", "corrupt", 1),
    Cell("tracker", "mid-decode", "stop", 8),
    Cell("last", "mid-decode", "stall", 8),
    Cell("middle", "last-token", "stop", 1),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with matrix_of(tmp_path_factory.mktemp("tiny")) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_streams_outlive_a_fault_and_nothing_is_left_of_it(matrix: Matrix, cell: Cell) -> None:
    outcome = matrix.run(cell)
    assert not outcome.failures, outcome.failure
    assert outcome.pause_seconds is not None


def test_cells_are_chosen_by_patterns() -> None:
    cells = all_cells()
    assert len(set(cells)) == len(cells)
    assert set(SAMPLE) <= set(cells)
    assert chosen(cells, []) == cells
    assert chosen(cells, ["middle/mid-decode/kill/1"]) == [Cell("middle", "mid-decode", "kill", 1)]
    assert {str(cell) for cell in chosen(cells, ["last/*/stop/8"])} == {
        f"last/{phase}/stop/8" for phase in ("prefill", "first-token", "mid-decode", "last-token")
    }
    assert chosen(cells, ["middle"]) == []


def test_the_table_has_what_was_run_and_why_it_failed() -> None:
    good = Outcome(Cell("middle", "prefill", "kill", 1), pause_seconds=0.25)
    bad = Outcome(Cell("middle", "mid-decode", "kill", 8), pause_seconds=3.0, failures=["wrong tokens"])
    heads, _, row, _, why = table([good, bad]).splitlines()
    assert heads.count("|") == row.count("|") == 2 + 4 * len(NUM_SESSIONS)
    assert row.startswith("| middle: kill | 0.25 s |")
    assert "**failed** (3.00 s)" in row
    assert why == "- middle/mid-decode/kill/8: wrong tokens"
