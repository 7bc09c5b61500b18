"""What `meshnet status` shows of nodes."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from meshnet.cli.coverage_picture import nodes_table
from tests.models import node, topology


def test_a_suspect_node_is_marked_in_its_row() -> None:
    mesh = topology(node("a", (0, 6)), replace(node("b", (6, 12)), alive=False))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(nodes_table(mesh))
    rows = capture.get().splitlines()
    assert [row.split()[:2] for row in rows if row.startswith(("a ", "b "))] == [["a", "127.0.0.1:1"], ["b", "suspect"]]
