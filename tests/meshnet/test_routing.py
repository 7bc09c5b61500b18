"""Routes: every layer once, few hops, never through a stub."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import MissingLayers, UnknownModel
from meshnet.model import LayerRange
from meshnet.routing import find_route
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
