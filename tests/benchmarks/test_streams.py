from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.streams import Outcome, Results, Stream, plot, table

# Two streams of four tokens, at once for two seconds.
OUTCOME = Outcome((Stream(4, 0.1, (0.01, 0.02, 0.03)), Stream(4, 0.3, (0.04, 0.05, 0.06))), 2.0)
RESULTS: Results = {1: {2: OUTCOME}, 2: {2: OUTCOME}}


def test_percentiles_are_those_of_all_streams() -> None:
    assert OUTCOME.tokens_per_second == 4
    assert [OUTCOME.first_ms(share) for share in (0.0, 0.5, 0.99)] == pytest.approx([100, 300, 300])
    assert [OUTCOME.gap_ms(share) for share in (0.0, 0.5, 0.95)] == pytest.approx([10, 40, 60])


def test_the_table_has_a_row_for_each_number_of_nodes_and_streams() -> None:
    shown = table(RESULTS)
    assert [list(column.cells) for column in shown.columns] == [
        ["1", "2"],
        ["2", "2"],
        ["4.0", "4.0"],
        ["300/300/300"] * 2,
        ["40.0/60.0/60.0"] * 2,
    ]


def test_the_plot_names_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "streams.svg"
    plot(RESULTS, path)
    drawn = path.read_text()
    for name in ("1 node", "2 nodes", "1 node, p50", "2 nodes, p99", "tokens/s, all streams", "ms between tokens"):
        assert f"<!-- {name} -->" in drawn


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install"):
        plot(RESULTS, tmp_path / "streams.svg")
