"""The coverage map in the terminal."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console, RenderableType

from meshnet.cli.coverage_picture import coverage_picture
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Hop, RouteProbe, Shard, ShardState, Topology
from tests.models import node, topology


def text(picture: RenderableType) -> str:
    console = Console(width=80, record=True, file=None, color_system=None)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()


def test_layers_across_and_nodes_down() -> None:
    picture = text(coverage_picture(topology(node("a", (0, 4)), node("b", (4, 12))), {}))
    assert "m  12 layers  complete" in picture
    assert "████········" in picture
    assert "····████████" in picture


def test_gaps_loading_and_shortfalls_are_shown() -> None:
    loading = Shard("m", LayerRange(4, 8), Quantization.INT8, ShardState.LOADING, bytes_done=30, bytes_total=120)
    mesh = topology(replace(node("a", (0, 4)), shards=(*node("a", (0, 4)).shards, loading)))
    picture = text(coverage_picture(mesh, {"m": "layers 8-12 fit on no node"}))
    assert "missing layers 4-12" in picture
    assert "████░░░░····" in picture
    assert "int8, 25% loaded" in picture
    assert "layers 8-12 fit on no node" in picture


def test_many_layers_share_a_character() -> None:
    picture = text(coverage_picture(topology(node("a", (0, 61)), num_layers=240), {}))
    assert "█" * 10 + "▄" + "·" * 29 in picture


def test_nothing_deployed_says_what_to_do() -> None:
    assert "meshnet deploy" in text(coverage_picture(Topology(), {}))


def test_routes_are_shown_with_what_is_known_of_them() -> None:
    hops = (Hop("a", LayerRange(0, 4)), Hop("b", LayerRange(4, 12)))
    routes = [
        RouteProbe("m", hops[1:], failure="no token has come through it yet"),
        RouteProbe("m", hops, latency_seconds=0.0351),
        RouteProbe("other", hops, latency_seconds=1.0),
    ]
    lines = text(coverage_picture(topology(node("a", (0, 4)), node("b", (4, 12))), {}, routes)).splitlines()
    shown = [" ".join(line.split()) for line in lines if line.startswith("route")]
    assert shown == [
        "route ready a:0-4 b:4-12, 35.1 ms a token",
        "route not ready b:4-12: no token has come through it yet",
    ]
