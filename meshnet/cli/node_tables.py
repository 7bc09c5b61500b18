"""The nodes of a mesh as tables in the terminal. Pure: a topology in, tables out."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from meshnet.sizes import format_size
from meshnet.topology import Link, Node, Speed, Topology

UNKNOWN = "-"


def nodes_table(topology: Topology) -> Table:
    """Who is here: one row a node. Sites are shown if there are several, the way to the tracker if it was measured, and
    below them which nodes have the files of a model that others fetch.

    A node whose heartbeats are overdue is marked as suspect, one that is drained as draining.
    """
    nodes = _by_id(topology)
    several_sites = len({node.site for node in nodes}) > 1
    measured_links = any(_tracker_link(node) for node in nodes)
    columns = ["node", "address", *["site"] * several_sites, "runs on", "sessions", "queue"]
    table = _table("Nodes", [*columns, *["to tracker"] * measured_links])
    for node in nodes:
        table.add_row(
            node.node_id + " *" * node.tracker_node + " suspect" * (not node.alive) + " draining" * node.draining,
            node.forward_address,
            *[node.site or UNKNOWN] * several_sites,
            f"{node.device}, {'+'.join(node.quantizations)}",
            str(node.num_sessions),
            str(node.queue_length),
            *[_way(_tracker_link(node))] * measured_links,
            style="yellow" if node.draining or not node.alive else None,
        )
    notes = ["* the tracker-node's own node"] if any(node.tracker_node for node in nodes) else []
    notes += _files(nodes)
    if notes:
        table.caption = Text("\n".join(notes), "dim", justify="left")
    return table


def measures_table(topology: Topology) -> Table:
    """What each node lends and what is measured of it.

    `lends` is its budget, `process` what its process takes now, the runtime included, `free` what nobody uses of the
    device's memory. Speeds are those of the models that the node holds, at the quantizations that it holds them at.
    """
    nodes = _by_id(topology)
    speeds = {node.node_id: _held_speeds(node) for node in nodes}
    named = len({speed.model_id for of_node in speeds.values() for speed in of_node}) > 1
    columns = ("node", "lends", "process", "free", "workspace", "decode", "prefill", *["speed of"] * named)
    table = _table("Memory and speed", columns)
    for node in nodes:
        of_node = speeds[node.node_id]
        table.add_row(
            node.node_id,
            format_size(node.vram_bytes),
            format_size(node.resident_bytes),
            _size(node.memory_free_bytes),
            _size(node.workspace_bytes),
            "\n".join(format_rate(speed.decode_tokens_per_second) for speed in of_node) or UNKNOWN,
            "\n".join(format_rate(speed.prefill_tokens_per_second) for speed in of_node) or UNKNOWN,
            *["\n".join(f"{speed.model_id} {speed.quantization}" for speed in of_node)] * named,
            style="yellow" if node.draining or not node.alive else None,
        )
    table.caption = Text("decode, prefill: tokens/s through one layer", "dim", justify="left")
    return table


def format_rate(rate: float) -> str:
    """`702`, `37.1k`, `1.5M`: three digits, for people."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g}{unit}"
    return f"{rate:.3g}"


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _by_id(topology: Topology) -> list[Node]:
    return [node for _, node in sorted(topology.nodes.items())]


def _size(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else format_size(num_bytes)


def _tracker_link(node: Node) -> Link | None:
    return next((link for link in node.links if not link.node_id), None)


def _files(nodes: Iterable[Node]) -> list[str]:
    """Where the files of models are of which some node has none, and may fetch what it serves."""
    nodes = list(nodes)
    lines = []
    for model_id in sorted({model_id for node in nodes for model_id in node.available_models}):
        holders = [node.node_id for node in nodes if model_id in node.available_models]
        if any(node.fetches and node.node_id not in holders for node in nodes):
            lines.append(f"files of {model_id}: {', '.join(holders)}; others fetch what they serve")
    return lines


def _way(link: Link | None) -> str:
    if link is None:
        return UNKNOWN
    rate = f", {_brief_size(link.bytes_per_second)}/s" if link.bytes_per_second else ""
    return f"{1000 * link.rtt_seconds:.2g} ms{rate}"


def _brief_size(num_bytes: float) -> str:
    """Without a fraction where there are three digits before it."""
    number, unit = format_size(int(num_bytes)).split()
    return f"{float(number):.3g} {unit}"


def _held_speeds(node: Node) -> list[Speed]:
    held = {(shard.model_id, shard.quantization) for shard in node.shards}
    return [speed for speed in node.speeds if (speed.model_id, speed.quantization) in held]
