"""The coverage map as a picture in the terminal. Pure: a topology in, text out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshnet.model import KvPrecision, LayerRange
from meshnet.sizes import format_size
from meshnet.topology import DeployedModel, Node, RouteProbe, Shard, ShardState, Topology

# Leaves room for names and sizes in 80 columns.
MAX_COLUMNS = 40
READY, PARTLY, LOADING, EMPTY = "█", "▄", "░", "·"
STYLES = {READY: "green", PARTLY: "green", LOADING: "yellow", EMPTY: "dim"}


def coverage_picture(
    topology: Topology, shortfalls: Mapping[str, str], routes: Sequence[RouteProbe] = ()
) -> RenderableType:
    """All deployed models, layers across and nodes down, and which of their routes are ready."""
    if not topology.models:
        return Text("No model is deployed. `meshnet deploy MODEL_ID` asks the mesh to serve one.")
    return Group(
        *(
            _model(topology, model, shortfalls.get(model_id, ""), [r for r in routes if r.model_id == model_id])
            for model_id, model in topology.models.items()
        )
    )


def _model(topology: Topology, model: DeployedModel, shortfall: str, routes: Sequence[RouteProbe]) -> RenderableType:
    coverage = topology.coverage(model.model_id)
    num_layers = model.manifest.num_layers
    columns = _columns(num_layers)
    state = Text("complete", "bold green") if coverage.complete else Text(_missing(coverage.missing), "bold red")
    grid = Table.grid(padding=(0, 2, 0, 0))
    for can_wrap in (False, False, True):
        grid.add_column(no_wrap=not can_wrap)
    grid.add_row("", Text(_ruler(columns), "dim"), "")
    for _, node in sorted(topology.nodes.items()):
        if any(shard.model_id == model.model_id for shard in node.shards):
            grid.add_row(node.node_id, _row(node, model.model_id, columns), _held(node, model.model_id))
    legend = Text(f"{READY} serves  {LOADING} loads  {EMPTY} does not hold", "dim")
    parts: list[RenderableType] = [
        Text.assemble((model.model_id, "bold"), f"  {num_layers} layers  ", state, _kv(model)),
        grid,
        legend,
    ]
    if shortfall:
        parts.insert(1, Text(shortfall, "red"))
    if routes:
        parts.append(_routes(routes))
    return Group(*parts, "")


def _kv(model: DeployedModel) -> str:
    return "" if model.kv_precision is KvPrecision.BFLOAT16 else f"  KV cache at {model.kv_precision}"


def _routes(routes: Sequence[RouteProbe]) -> RenderableType:
    """One line a route, the ready ones first."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for route in sorted(routes, key=lambda route: not route.ready):
        hops = " ".join(map(str, route.hops))
        if route.ready:
            took = "" if route.latency_seconds is None else f", {1000 * route.latency_seconds:.3g} ms a token"
            grid.add_row(Text("route ready", "green"), f"{hops}{took}")
        else:
            grid.add_row(Text("route not ready", "yellow"), f"{hops}: {route.failure}")
    return grid


def _columns(num_layers: int) -> list[LayerRange]:
    """The layers that each character stands for: one, or several if there are many."""
    width = -(-num_layers // MAX_COLUMNS)
    return [LayerRange(start, min(start + width, num_layers)) for start in range(0, num_layers, width)]


def _ruler(columns: list[LayerRange]) -> str:
    """Layer numbers above every tenth column."""
    ruler = ""
    for index in range(0, len(columns), 10):
        ruler = ruler.ljust(index) + str(columns[index].start)
    return ruler


def _row(node: Node, model_id: str, columns: list[LayerRange]) -> Text:
    ready, loading = node.layers(model_id), node.layers(model_id, ShardState.LOADING)
    row = Text()
    for column in columns:
        mark = _mark(column.layers, ready, loading)
        row.append(mark, STYLES[mark])
    return row


def _mark(layers: range, ready: frozenset[int], loading: frozenset[int]) -> str:
    if ready.issuperset(layers):
        return READY
    if not ready.isdisjoint(layers):
        return PARTLY
    return LOADING if not loading.isdisjoint(layers) else EMPTY


def _held(node: Node, model_id: str) -> str:
    return ", ".join(_shard(shard) for shard in node.shards if shard.model_id == model_id)


def _shard(shard: Shard) -> str:
    size = f"{format_size(shard.bytes_total)} {shard.quantization}"
    if shard.state is ShardState.LOADING:
        size += f", {100 * shard.bytes_done // max(shard.bytes_total, 1)}% loaded"
    return f"{shard.layers} ({size})"


def _missing(missing: Iterable[LayerRange]) -> str:
    return "missing layers " + ", ".join(map(str, missing))
