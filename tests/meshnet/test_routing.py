"""Routes: every layer once, at the least cost, never through a stub."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import MissingLayers, UnknownModel
from meshnet.hop_cost import HopCosts, Wish
from meshnet.model import LayerRange, Quantization
from meshnet.route_search import Layout, RouteSearch, Run
from meshnet.routing import choose_route, find_route, find_routes
from meshnet.topology import Hop, Link, Speed, Topology
from tests.models import node, topology


def route(*args: object, **kwargs: object) -> list[str]:
    return [str(hop) for hop in find_route(*args, **kwargs)]  # type: ignore[arg-type]


def test_three_nodes_one_after_the_other() -> None:
    mesh = topology(node("a", (0, 4)), node("b", (4, 8)), node("c", (8, 12)))
    assert route(mesh, "m", "a") == ["a:0-4", "b:4-8", "c:8-12"]


def test_fewer_hops_win_and_a_hop_may_start_inside_a_shard() -> None:
    mesh = topology(node("a", (0, 6)), node("b", (6, 9)), node("c", (9, 12)), node("d", (4, 12)))
    assert route(mesh, "m", "a") == ["a:0-6", "d:6-12"]


def test_between_equal_routes_the_node_with_fewer_sessions() -> None:
    mesh = topology(node("a", (0, 6)), node("b", (6, 12), sessions=3), node("c", (6, 12), sessions=1))
    assert route(mesh, "m", "a") == ["a:0-6", "c:6-12"]
    assert route(mesh, "m", "a", avoid={"c"}) == ["a:0-6", "b:6-12"]


def test_a_detour_over_many_nodes_is_better_than_a_suspect() -> None:
    suspect = replace(node("s", (1, 12)), alive=False)
    chain = [node(f"n{i}", (i, i + 1)) for i in range(12)]
    mesh = topology(suspect, *chain)
    assert route(mesh, "m", "n0") == [f"n{i}:{i}-{i + 1}" for i in range(12)]


def test_a_suspect_is_passed_where_no_other_serves() -> None:
    suspect = replace(node("s", (3, 9)), alive=False)
    mesh = topology(node("a", (0, 4)), suspect, node("b", (8, 12)))
    assert route(mesh, "m", "a") == ["a:0-4", "s:4-9", "b:9-12"]
    two = topology(node("a", (0, 4)), suspect, replace(node("t", (4, 12)), alive=False), node("b", (8, 12)))
    assert len(route(two, "m", "a")) == 2


def test_a_suspect_entry_node_still_has_its_route() -> None:
    mesh = topology(replace(node("s", (0, 6)), alive=False), node("b", (6, 12)))
    assert route(mesh, "m", "s") == ["s:0-6", "b:6-12"]


def test_a_draining_node_is_passed_by_if_that_costs_no_hop() -> None:
    draining = replace(node("b", (6, 12)), draining=True)
    mesh = topology(node("a", (0, 6)), draining, node("c", (6, 12), sessions=900))
    assert route(mesh, "m", "a") == ["a:0-6", "c:6-12"]
    longer = topology(node("a", (0, 6)), draining, node("c", (6, 9)), node("d", (9, 12)))
    assert route(longer, "m", "a") == ["a:0-6", "b:6-12"]


def test_a_node_can_be_visited_twice() -> None:
    mesh = topology(node("a", (0, 4), (8, 12)), node("b", (4, 8)))
    assert route(mesh, "m", "a") == ["a:0-4", "b:4-8", "a:8-12"]


def test_what_is_missing_is_named() -> None:
    mesh = topology(node("a", (0, 4)), node("b", (6, 9)))
    with pytest.raises(MissingLayers) as missing:
        find_route(mesh, "m", "a")
    assert missing.value.missing == (LayerRange(4, 6), LayerRange(9, 12))
    with pytest.raises(MissingLayers) as missing:
        find_route(mesh, "m", "b")
    assert missing.value.missing == (LayerRange(0, 1), LayerRange(4, 6), LayerRange(9, 12))
    with pytest.raises(UnknownModel, match="deployed models: m"):
        find_route(mesh, "x", "a")


def test_stubs_and_real_nodes_never_share_a_route() -> None:
    mesh = topology(node("a", (0, 6)), node("s", (6, 12), stub=True))
    with pytest.raises(MissingLayers):
        find_route(mesh, "m", "a")
    stubs = topology(node("a", (0, 6), stub=True), node("s", (6, 12), stub=True))
    assert route(stubs, "m", "a") == ["a:0-6", "s:6-12"]


RANGES = st.lists(
    st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda r: r[0] < r[1]), min_size=1, max_size=7
)


@given(RANGES)
def test_a_route_covers_every_layer_once_or_names_what_is_missing(ranges: list[tuple[int, int]]) -> None:
    mesh = topology(*(node(f"n{index}", layers) for index, layers in enumerate(ranges)))
    covered = {layer for start, end in ranges for layer in range(start, end)}
    for entry in mesh.entry_nodes("m"):
        if covered != set(range(12)):
            with pytest.raises(MissingLayers) as missing:
                find_route(mesh, "m", entry.node_id)
            assert {layer for r in missing.value.missing for layer in r.layers} == set(range(12)) - covered
            continue
        hops = find_route(mesh, "m", entry.node_id)
        assert [layer for hop in hops for layer in hop.layers.layers] == list(range(12))
        assert hops[0].node_id == entry.node_id
        assert all(hop.layers.start in mesh.nodes[hop.node_id].layers("m") for hop in hops)


LINKS_TO_TRACKER = st.none() | st.tuples(st.sampled_from((0.001, 0.01, 0.1)), st.sampled_from((None, 1e5, 1e7)))


@st.composite
def meshes(draw: st.DrawFn, *, measured: bool) -> Topology:
    """Up to six nodes of 6 layers, unequal in all ways. `measured`: they know the ways between them; else only those to
    the tracker."""
    nodes = []
    for index in range(draw(st.integers(2, 5))):
        start, end = sorted(draw(st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True)))
        known = draw(LINKS_TO_TRACKER)
        speed = draw(st.none() | st.sampled_from((20.0, 100.0, 101.0, 2000.0)))
        nodes.append(
            replace(
                node(f"n{index}", (0 if index == 0 else start, end), sessions=draw(st.integers(0, 9))),
                queue_length=draw(st.integers(0, 2)),
                kv_tokens_free=draw(st.sampled_from((0, 100))),
                alive=draw(st.booleans()),
                speeds=(Speed("m", Quantization.BFLOAT16, 1.0, speed),) if speed else (),
                links=(Link("", *known),) if known else (),
            )
        )
    if measured:
        ids = st.sampled_from([n.node_id for n in nodes])
        ways = st.lists(
            st.builds(Link, ids, st.sampled_from((0.0005, 0.02, 0.3)), st.none() | st.just(1e4)), max_size=3
        )
        nodes = [replace(n, links=(*n.links, *draw(ways))) for n in nodes]
    nodes.append(node("last", (3, 6)))
    return topology(*nodes, num_layers=6)


def all_routes(mesh: Topology, start: int, num_layers: int) -> list[tuple[Hop, ...]]:
    """Every way to run the layers from `start` on, whoever begins."""
    if start == num_layers:
        return [()]
    return [
        (Hop(n.node_id, LayerRange(start, end)), *rest)
        for n in mesh.nodes.values()
        for end in range(start + 1, num_layers + 1)
        if n.layers("m").issuperset(range(start, end))
        for rest in all_routes(mesh, end, num_layers)
        if not (rest and rest[0].node_id == n.node_id)
    ]


@settings(deadline=None, max_examples=200)
@given(st.one_of(meshes(measured=False), meshes(measured=True)), st.none() | st.integers(0, 5))
def test_no_route_is_cheaper_than_the_one_that_is_found(mesh: Topology, spread: int | None) -> None:
    wish = Wish(spread, {"n1": 2}, 50)
    routes = [route for route in all_routes(mesh, 0, 6) if route[0].node_id == "n0"]
    if not routes:
        with pytest.raises(MissingLayers):
            find_route(mesh, "m", "n0", wish=wish)
        return
    costs = HopCosts(mesh, "m", wish)
    found = find_route(mesh, "m", "n0", wish=wish)
    assert costs.route_seconds(found) == pytest.approx(min(map(costs.route_seconds, routes)), rel=0, abs=1e-7)


def speeds(tokens_per_second: float) -> tuple[Speed, ...]:
    return (Speed("m", Quantization.BFLOAT16, 1.0, tokens_per_second),)


def test_the_slower_of_two_nodes_runs_fewer_of_the_layers_that_both_hold() -> None:
    slow, fast = replace(node("a", (0, 8)), speeds=speeds(100)), replace(node("b", (4, 12)), speeds=speeds(1000))
    assert route(topology(slow, fast), "m", "a") == ["a:0-4", "b:4-12"]
    swapped = topology(replace(slow, speeds=speeds(1000)), replace(fast, speeds=speeds(100)))
    assert route(swapped, "m", "a") == ["a:0-8", "b:8-12"]


def test_a_node_that_was_not_measured_counts_as_the_median_of_those_that_were() -> None:
    slow, fast = replace(node("b", (6, 12)), speeds=speeds(10)), replace(node("d", (6, 12)), speeds=speeds(5000))
    mesh = topology(node("a", (0, 6)), slow, node("c", (6, 12)), replace(fast, alive=False))
    assert route(mesh, "m", "a") == ["a:0-6", "c:6-12"]


def test_a_node_nearby_wins_by_its_own_measurement_or_by_the_other_ones() -> None:
    far, near = Link("b", 0.5, 1e6), Link("c", 0.001, 1e6)
    a, b, c = node("a", (0, 6)), node("b", (6, 12)), node("c", (6, 12))
    assert route(topology(replace(a, links=(far, near)), b, c), "m", "a")[1] == "c:6-12"
    assert route(topology(a, b, replace(c, links=(replace(near, node_id="a"),))), "m", "a")[1] == "c:6-12"
    to_tracker = Link("", 0.5, 1e6)
    assert route(topology(a, replace(b, links=(to_tracker,)), c), "m", "a")[1] == "c:6-12"


def test_a_node_without_room_is_passed_only_where_no_other_serves() -> None:
    full, free = node("b", (6, 12)), replace(node("c", (6, 12), sessions=50), kv_tokens_free=500)
    mesh = topology(replace(node("a", (0, 6)), kv_tokens_free=500), full, free)
    assert route(mesh, "m", "a", wish=Wish(kv_tokens=400))[1] == "c:6-12"
    assert route(mesh, "m", "a", wish=Wish(kv_tokens=0))[1] == "b:6-12"
    assert route(mesh, "m", "a", wish=Wish(kv_tokens=400), avoid={"c"})[1] == "b:6-12"


def replicated() -> Topology:
    """Three replicas of the second half, and two of the last third of it."""
    return topology(
        node("a", (0, 6)), *(node(f"b{i}", (6, 10)) for i in range(3)), *(node(f"c{i}", (10, 12)) for i in range(2))
    )


def test_many_sessions_are_spread_over_all_replicas_that_are_about_as_good() -> None:
    mesh = replicated()
    taken = Counter(hop.node_id for spread in range(600) for hop in find_route(mesh, "m", "a", wish=Wish(spread)))
    assert taken["a"] == 600
    assert all(150 < taken[f"b{i}"] < 250 for i in range(3))
    assert all(250 < taken[f"c{i}"] < 350 for i in range(2))
    much_slower = replace(mesh.nodes["b0"], speeds=speeds(1))
    mesh = replace(mesh, nodes={**mesh.nodes, "b0": much_slower, "b1": replace(mesh.nodes["b1"], speeds=speeds(1000))})
    assert not any(hop.node_id == "b0" for spread in range(50) for hop in find_route(mesh, "m", "a", wish=Wish(spread)))


def test_sessions_that_the_topology_does_not_show_yet_count() -> None:
    mesh, load = replicated(), Counter[str]()
    for _ in range(30):
        load.update(hop.node_id for hop in find_route(mesh, "m", "a", wish=Wish(extra_load=load)))
    assert [load[f"b{i}"] for i in range(3)] == [10, 10, 10]
    assert [load[f"c{i}"] for i in range(2)] == [15, 15]


def test_a_few_routes_pass_every_node_and_the_first_is_the_cheapest() -> None:
    mesh = replicated()
    routes = find_routes(mesh, "m", "a", limit=8)
    assert routes[0] == find_route(mesh, "m", "a")
    assert len(routes) == 3
    assert {hop.node_id for way in routes for hop in way} == mesh.nodes.keys()
    assert find_routes(mesh, "m", "a", limit=2) == routes[:2]
    suspect = replace(mesh, nodes={**mesh.nodes, "b1": replace(mesh.nodes["b1"], alive=False)})
    assert "b1" not in {hop.node_id for way in find_routes(suspect, "m", "a", limit=8) for hop in way}


def test_the_cheapest_of_given_routes_is_chosen_as_it_would_be_found() -> None:
    mesh = topology(node("a", (0, 6)), replace(node("b", (6, 12)), draining=True), node("c", (6, 12), sessions=900))
    through_b, through_c = ((Hop("a", LayerRange(0, 6)), Hop(i, LayerRange(6, 12))) for i in "bc")
    assert choose_route(mesh, "m", [through_b, through_c]) == through_c
    assert choose_route(mesh, "m", [through_b]) == through_b
    assert choose_route(mesh, "m", []) is None


def test_a_thousand_nodes_are_looked_at_layer_by_layer_and_not_pair_by_pair() -> None:
    random = Random(1)
    nodes = [
        node(f"n{i}", (start, start + 8)) for i in range(1000) for start in [0 if i == 0 else random.randint(0, 72)]
    ]
    links = [tuple(Link(f"n{random.randrange(1000)}", random.random(), 1e6) for _ in range(15)) for _ in nodes]
    nodes = [replace(n, links=known) for n, known in zip(nodes, links, strict=True)]
    mesh = topology(*nodes, num_layers=80)
    runs = [Run(n, n.shards[0].layers.start, n.shards[0].layers.end) for n in nodes]
    search = RouteSearch(Layout(runs, 80), "n0", HopCosts(mesh, "m"))
    hops = search.route()
    assert [layer for hop in hops for layer in hop.layers.layers] == list(range(80))
    assert search.num_states == 8 * 1000
    # Each layer boundary that a node may begin or go on at, and the two ends of each measured pair that can meet.
    assert search.num_moves < 9 * 1000 + 2 * 2 * 15 * 1000 * 0.25
