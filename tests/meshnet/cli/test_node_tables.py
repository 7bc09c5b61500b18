"""What `meshnet status` shows of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from meshnet.cli.node_tables import format_rate, measures_table, nodes_table
from meshnet.model import Quantization
from meshnet.topology import Link, Node, Speed
from tests.models import node, topology


def lines(table: Table, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def rows(table: Table) -> dict[str, list[str]]:
    """Words of the rows, by the first."""
    return {words[0]: words[1:] for line in lines(table) if (words := line.split())}


def measured(node_id: str, *layers: tuple[int, int]) -> Node:
    return replace(
        node(node_id, *layers),
        vram_bytes=230_000_000,
        memory_free_bytes=12_300_000_000,
        workspace_bytes=10_700_000,
        speeds=(
            Speed("m", Quantization.BFLOAT16, 37100.0, 702.0),
            Speed("m", Quantization.INT8, 9000.0, 295.0),
            Speed("other", Quantization.BFLOAT16, 1.0, 1.0),
        ),
    )


def test_a_suspect_node_is_marked_in_its_row() -> None:
    shown = rows(nodes_table(topology(node("a", (0, 6)), replace(node("b", (6, 12)), alive=False))))
    assert shown["a"][0] == "127.0.0.1:1"
    assert shown["b"][:2] == ["suspect", "127.0.0.1:1"]


def test_all_that_is_known_fits_eighty_columns() -> None:
    link = Link("", rtt_seconds=0.00042, bytes_per_second=1.2e9)
    nodes = [replace(measured(f"node-{i}", (i, i + 1)), site=f"room-{i}", links=(link,)) for i in range(3)]
    for table in (nodes_table(topology(*nodes)), measures_table(topology(*nodes))):
        shown = lines(table)
        assert max(map(len, shown)) <= 80
        assert sum(line.startswith("node-") for line in shown) == 3
        assert len(shown) == 2 + 3 + (table.caption is not None)


def test_sites_and_links_are_shown_where_they_tell_something() -> None:
    alone = " ".join(lines(nodes_table(topology(replace(node("a", (0, 12)), site="kitchen")))))
    assert "site" not in alone
    assert "kitchen" not in alone
    assert "to tracker" not in alone
    a = replace(node("a", (0, 6)), site="kitchen", links=(Link("b", 9.0), Link("", 0.00042, 1.2e9)), queue_length=7)
    shown = rows(nodes_table(topology(a, node("b", (6, 12)))))
    assert shown["node"] == ["address", "site", "runs", "on", "sessions", "queue", "to", "tracker"]
    assert shown["a"] == ["127.0.0.1:1", "kitchen", "cpu,", "bfloat16", "0", "7", "0.42", "ms,", "1.2", "GB/s"]
    assert shown["b"] == ["127.0.0.1:1", "-", "cpu,", "bfloat16", "0", "0", "-"]


def test_all_quantizations_of_a_node_are_shown() -> None:
    a = replace(node("a", (0, 12)), fallbacks=(Quantization.INT8, Quantization.NF4))
    assert "bfloat16+int8+nf4" in rows(nodes_table(topology(a)))["a"]


def test_the_speed_shown_is_of_what_the_node_holds() -> None:
    shown = rows(measures_table(topology(measured("a", (0, 6)), node("b", (6, 12)))))
    assert shown["a"] == ["230.0", "MB", "0", "B", "12.3", "GB", "10.7", "MB", "702", "37.1k"]
    assert shown["b"] == ["1.0", "MB", "0", "B", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("rate", "text"), [(0.5, "0.5"), (35, "35"), (702.4, "702"), (1000, "1k"), (37100, "37.1k"), (2.5e6, "2.5M")]
)
def test_rates_have_three_digits(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_who_fetches_weights_is_shown_where_somebody_does() -> None:
    plain, fetching = (
        replace(node("a", (0, 6)), available_models=frozenset({"m"})),
        replace(node("b"), fetches=True, available_models=frozenset()),
    )
    assert "files of" not in " ".join(lines(nodes_table(topology(plain))))
    assert "files of" not in " ".join(lines(nodes_table(topology(replace(plain, fetches=True)))))
    shown = " ".join(" ".join(lines(nodes_table(topology(plain, fetching)))).split())
    assert "files of m: a; others fetch what they serve" in shown
