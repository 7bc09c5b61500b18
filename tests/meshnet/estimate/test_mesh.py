"""Estimates of whole meshes: which routes, what memory, how many at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet.directive import Directive, DirectiveKind
from meshnet.errors import InvalidRequest
from meshnet.estimate.mesh import Questions, estimate
from meshnet.estimate.pipeline import Way
from meshnet.estimate.planned import planned
from meshnet.estimate.surroundings import surroundings_of_mesh
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Link, Node, ShardState, Speed, Topology
from tests.models import manifest, node, topology

MODEL = manifest()
SPEED = Speed("m", Quantization.BFLOAT16, 10_000, 100)
QUESTIONS = Questions(prompts=(100, 500), streams=(1, 64), new_tokens=28)


def fast(one: Node, *links: Link, speed: Speed = SPEED) -> Node:
    return replace(one, speeds=(speed,), links=links)


def mesh(*nodes: Node) -> Topology:
    return topology(*nodes)


def test_two_halves_make_a_route_and_its_rates() -> None:
    of = mesh(fast(node("a", (0, 6))), fast(node("b", (6, 12))))
    told = estimate(of, "m", surroundings_of_mesh(of, "m", {"m": MODEL}), QUESTIONS)
    (route,) = told.routes
    assert " > ".join(map(str, route)) == "a:0-6 > b:6-12"
    assert [found.num_tokens for found in told.prompts] == [100, 500]
    assert told.token_seconds is not None
    assert told.streams[0].tokens_per_second == pytest.approx(1 / told.token_seconds)
    # Room for 2048 tokens, of which each session takes 128.
    assert [(found.num_streams, found.at_once) for found in told.streams] == [(1, 1), (64, 16)]
    assert told.streams[1].limit == "KV cache"
    assert told.streams[1].tokens_per_second > 4 * told.streams[0].tokens_per_second
    for found in told.nodes:
        # Six layers at 100 tokens/s, and 114 tokens of 4 bytes in each at the 100 kB/s that this comes to.
        assert found.step_seconds == pytest.approx(0.06 + 6 * 114 * 4 / 100e3)
        assert found.kv_bytes == 6 * 4 * 2048
        assert found.vram_bytes == sum((found.weight_bytes, found.kv_bytes, found.workspace_bytes, found.free_bytes))
    assert [found.weight_bytes for found in told.nodes] == [4000 + 6000, 6000]


def test_replicas_make_more_routes_and_room() -> None:
    of = mesh(fast(node("a", (0, 6))), fast(node("b", (6, 12))), fast(node("c", (6, 12))))
    surroundings = surroundings_of_mesh(of, "m", {"m": MODEL})
    told = estimate(of, "m", surroundings, QUESTIONS)
    assert {route[1].node_id for route in told.routes} == {"b", "c"}
    # Each session is on node a too.
    assert told.streams[1].at_once == 16
    both = mesh(*of.nodes.values(), fast(node("d", (0, 6))))
    assert estimate(both, "m", surroundings_of_mesh(both, "m", {"m": MODEL}), QUESTIONS).streams[1].at_once > 16


def test_without_all_layers_there_is_memory_but_no_speed() -> None:
    of = mesh(fast(node("a", (0, 6))))
    told = estimate(of, "m", surroundings_of_mesh(of, "m", {"m": MODEL}), QUESTIONS, ["layers 6-12 fit nowhere"])
    assert (told.routes, told.prompts, told.streams, told.token_seconds) == ((), (), (), None)
    assert told.shortfalls == ("layers 6-12 fit nowhere",)
    assert told.nodes[0].weight_bytes == 10_000


def test_links_are_as_measured_by_either_end_or_as_both_see_the_tracker() -> None:
    of = mesh(
        fast(node("a", (0, 12)), Link("b", 0.01, 5e6), Link("", 0.02, 1e6)),
        fast(node("b"), Link("", 0.04, 2e6)),
        fast(node("c"), Link("a", 0.03), Link("", 0.06, 3e6)),
        fast(node("d")),
    )
    way = surroundings_of_mesh(of, "m", {"m": MODEL}).way
    assert way("a", "b") == way("b", "a") == Way(0.005, 5e6)
    assert way("a", "c") == Way(0.015, 1e6)
    assert way("b", "c") == Way(0.025, 2e6)
    assert way("b", "d") == Way(0.015, 2e6)


def test_what_was_not_measured_is_taken_for_the_slowest_or_refused() -> None:
    other = replace(SPEED, model_id="other", decode_tokens_per_second=10)
    of = mesh(fast(node("a", (0, 12))), fast(node("b"), speed=other), node("c"))
    found = surroundings_of_mesh(of, "m", {"m": MODEL, "other": MODEL}).hardware
    # 1000 bytes a layer.
    assert {i: one.bytes_per_second for i, one in found.items()} == {"a": 100e3, "b": 10e3, "c": 10e3}
    with pytest.raises(InvalidRequest, match="no node of this mesh has measured its speed yet"):
        surroundings_of_mesh(mesh(node("a", (0, 12))), "m", {"m": MODEL})


def test_a_plan_is_carried_out_and_what_loads_is_loaded() -> None:
    of = mesh(node("a", (0, 12)), node("b"))
    loading = replace(of.nodes["a"].shards[0], state=ShardState.LOADING)
    of = replace(of, nodes=of.nodes | {"a": replace(of.nodes["a"], shards=(loading,))})

    def order(node_id: str, kind: DirectiveKind, start: int, end: int) -> Directive:
        return Directive("", node_id, kind, "m", LayerRange(start, end), 0, "", Quantization.INT8)

    plan = [order("b", DirectiveKind.LOAD_SHARD, 4, 8), order("a", DirectiveKind.DROP_SHARD, 4, 8)]
    then = planned(of, plan, of.models["m"])
    assert [(str(shard.layers), shard.state) for shard in then.nodes["a"].shards] == [
        ("0-4", ShardState.READY),
        ("8-12", ShardState.READY),
    ]
    (shard,) = then.nodes["b"].shards
    assert (str(shard.layers), shard.quantization, shard.state) == ("4-8", Quantization.INT8, ShardState.READY)
    assert of.nodes["b"].shards == ()
