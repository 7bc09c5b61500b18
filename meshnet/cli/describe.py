"""`meshnet describe`: all about one node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshnet.admin import NodeDescription
from meshnet.cli.admin_client import admin_client
from meshnet.cli.directives import directives_table
from meshnet.cli.options import DEFAULT_TRACKER, JsonOption, TrackerOption
from meshnet.cli.output import console, print_json, table
from meshnet.security.options import SecretOption
from meshnet.sizes import format_size
from meshnet.topology import Node, ShardState

BAR_COLUMNS = 40
USED, FREE, KEPT, BELIEVED = "█", "░", "▒", "▲"
# Of a node that has done a lot, the rest is told by `meshnet directives`.
MAX_DIRECTIVES = 12


def describe(
    node_id: Annotated[str, typer.Argument(help="A node of the mesh.")],
    tracker: TrackerOption = DEFAULT_TRACKER,
    secret: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one node: its memory, what it holds, what is measured of it, and what it was told to do."""
    with admin_client(tracker, secret) as client:
        description = client.describe(node_id)
    if as_json:
        print_json(asdict(description))
    else:
        console.print(node_picture(description, time.time()))


def node_picture(description: NodeDescription, now: float) -> RenderableType:
    """`now`: seconds since 1970."""
    node = description.node
    newest = description.directives[-MAX_DIRECTIVES:]
    hidden = len(description.directives) - len(newest)
    title = f"Directives (and {hidden} before: `meshnet directives {node.node_id}`)" if hidden else "Directives"
    tables = (_shards(node), _speeds(node), _links(node), directives_table(newest, now, title=title))
    parts: list[RenderableType] = [_facts(description), "", _memory(description)]
    for made in tables:
        if made.row_count:
            parts += ["", made]
    return Group(*parts)


def memory_bar(description: NodeDescription) -> str:
    """What the node lends, as one line: used, free, and what is kept back for work."""
    lends = max(description.node.vram_bytes, 1)
    used = min(round(BAR_COLUMNS * description.planned_bytes / lends), BAR_COLUMNS)
    free = min(round(BAR_COLUMNS * description.free_bytes / lends), BAR_COLUMNS - used)
    return USED * used + FREE * free + KEPT * (BAR_COLUMNS - used - free)


def _facts(description: NodeDescription) -> Table:
    node = description.node
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("node", Text.assemble((node.node_id, "bold"), *_marks(node)))
    grid.add_row("heard", f"{description.silent_seconds:.1f} s ago")
    grid.add_row("address", f"{node.forward_address} (gRPC {node.grpc_address})")
    runs_on = f"{node.device}, {' or '.join(node.quantizations)}"
    grid.add_row("runs on", runs_on + (f", meshnet {node.software_version}" if node.software_version else ""))
    if node.site:
        grid.add_row("site", node.site)
    grid.add_row("files of", ", ".join(sorted(node.available_models)) or "no models")
    if node.fetches:
        grid.add_row("fetches weights", "yes, of models whose files it lacks")
    grid.add_row("sessions", f"{node.num_sessions}, {node.kv_tokens_free} KV cache tokens free")
    grid.add_row("waiting", f"{node.queue_length} frames")
    return grid


def _marks(node: Node) -> Iterator[tuple[str, str]]:
    if node.tracker_node:
        yield "  the tracker-node's own node", "dim"
    if node.stub:
        yield "  stub", "dim"
    if not node.alive:
        yield "  suspect", "yellow"
    if node.draining:
        yield "  draining", "yellow"


def _memory(description: NodeDescription) -> Table:
    node = description.node
    kept = max(node.vram_bytes - description.planned_bytes - description.free_bytes, 0)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim")
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row("memory", Text(memory_bar(description), "green"), f"lends {format_size(node.vram_bytes)}")
    believed = description.believed_bytes
    if believed is not None:
        column = min(BAR_COLUMNS * believed // max(node.vram_bytes, 1), BAR_COLUMNS - 1)
        text = f"believed to hold {format_size(believed)} at most: a load has failed"
        grid.add_row("", Text(" " * column + BELIEVED, "yellow"), Text(text, "yellow"))
    sizes = ((USED, "used", description.planned_bytes), (FREE, "free", description.free_bytes), (KEPT, "kept", kept))
    for mark, what, size in sizes:
        grid.add_row("", f"{mark} {what} {format_size(size)}", _MEANING[what])
    grid.add_row("", f"  process {format_size(node.resident_bytes)}", _device_memory(node))
    return grid


_MEANING = {
    "used": "weights and KV cache, loaded or ordered",
    "free": "for more layers",
    "kept": "workspace of steps, or given to nobody",
}


def _device_memory(node: Node) -> str:
    parts = []
    if node.memory_free_bytes is not None:
        parts.append(f"{format_size(node.memory_free_bytes)} of the device are free")
    if node.workspace_bytes is not None:
        parts.append(f"workspace measured: {format_size(node.workspace_bytes)}")
    return ", ".join(parts)


def _shards(node: Node) -> Table:
    """Where the weights came from is shown of a node that fetches some."""
    made = table("Shards", "model", "layers", "stored as", "state", "weights", *["from"] * node.fetches)
    for shard in node.shards:
        done = f" {100 * shard.bytes_done // max(shard.bytes_total, 1)}%" if shard.state is ShardState.LOADING else ""
        made.add_row(
            shard.model_id,
            str(shard.layers),
            shard.quantization,
            Text(shard.state + done, "yellow" if done else "green"),
            format_size(shard.bytes_total),
            *["files here" if shard.model_id in node.available_models else "fetched"] * node.fetches,
        )
    return made


def _speeds(node: Node) -> Table:
    made = table("Speeds, in tokens a second through one layer", "model", "stored as", "prompts", "one by one")
    for speed in node.speeds:
        made.add_row(
            speed.model_id,
            speed.quantization,
            f"{speed.prefill_tokens_per_second:,.0f}",
            f"{speed.decode_tokens_per_second:,.0f}",
        )
    return made


def _links(node: Node) -> Table:
    made = table("Links", "to", "there and back", "rate")
    for link in node.links:
        rate = "-" if link.bytes_per_second is None else f"{format_size(int(link.bytes_per_second))}/s"
        made.add_row(link.node_id or "the tracker", f"{1000 * link.rtt_seconds:.1f} ms", rate)
    return made
