"""Which probes are sent, when, and what their outcomes mean."""

from __future__ import annotations

from dataclasses import replace

from meshnet.hop_cost import NO_WISH, Wish
from meshnet.model import LayerRange
from meshnet.topology import Hop, RouteProbe, Topology
from services.node.core.probing import (
    FIRST_RETRY_SECONDS,
    LONGEST_RETRY_SECONDS,
    MAX_AT_ONCE,
    MAX_REMEMBERED,
    MAX_ROUTES,
    REFRESH_SECONDS,
    Probe,
    ProbeTable,
)
from tests import models

A = models.node("a", (0, 4))
B = models.node("b", (4, 12))
C = models.node("c", (4, 12), sessions=1)
THROUGH_B = (Hop("a", LayerRange(0, 4)), Hop("b", LayerRange(4, 12)))
THROUGH_C = (Hop("a", LayerRange(0, 4)), Hop("c", LayerRange(4, 12)))
WHOLE = models.topology(A, B)
READY_B = RouteProbe("m", THROUGH_B, latency_seconds=0.5)


def the_only(probes: tuple[Probe, ...]) -> Probe:
    (probe,) = probes
    return probe


def proven(topology: Topology = WHOLE) -> ProbeTable:
    table = ProbeTable("a")
    table.succeeded(the_only(table.start(topology, 0.0)), 0.5, 0.0)
    return table


def test_a_complete_route_is_probed_once_and_then_ready() -> None:
    table = ProbeTable("a")
    probe = the_only(table.start(WHOLE, 0.0))
    assert (probe.model_id, probe.route) == ("m", THROUGH_B)
    assert table.outcomes() == ()
    assert table.start(WHOLE, 100.0) == ()
    assert table.retry_at() is None
    table.succeeded(probe, 0.5, 100.0)
    assert table.outcomes() == (READY_B,)
    assert table.retry_at() == 100.0 + REFRESH_SECONDS
    assert table.start(WHOLE, 99.9 + REFRESH_SECONDS) == ()


def test_a_ready_route_is_proven_anew_and_stays_in_use_meanwhile() -> None:
    table = proven()
    again = the_only(table.start(WHOLE, REFRESH_SECONDS))
    assert again.route == THROUGH_B
    assert table.outcomes() == (READY_B,)
    table.postponed(again, REFRESH_SECONDS)
    assert table.outcomes() == (READY_B,)
    again = the_only(table.start(WHOLE, REFRESH_SECONDS + FIRST_RETRY_SECONDS))
    table.succeeded(again, 0.75, 70.0)
    assert table.outcomes() == (RouteProbe("m", THROUGH_B, latency_seconds=0.75),)
    table.failed(the_only(table.start(WHOLE, 70.0 + REFRESH_SECONDS)), "mute", 130.0)
    assert table.outcomes() == (RouteProbe("m", THROUGH_B, "mute"),)


def test_only_an_entry_node_with_a_whole_route_probes() -> None:
    assert ProbeTable("b").start(WHOLE, 0.0) == ()
    assert ProbeTable("a").start(models.topology(A), 0.0) == ()
    assert ProbeTable("stranger").start(WHOLE, 0.0) == ()
    assert ProbeTable("a").start(replace(WHOLE, models={}), 0.0) == ()


def test_stub_nodes_probe_too() -> None:
    stub = models.topology(models.node("a", (0, 4), stub=True), models.node("b", (4, 12), stub=True))
    assert the_only(ProbeTable("a").start(stub, 0.0)).route == THROUGH_B


def test_a_failure_is_told_and_tried_again_after_growing_pauses() -> None:
    table = ProbeTable("a")
    now, pauses = 0.0, []
    for _ in range(8):
        table.failed(the_only(table.start(WHOLE, now)), "mute", now)
        assert table.outcomes() == (RouteProbe("m", THROUGH_B, "mute"),)
        retry_at = table.retry_at()
        assert retry_at is not None
        assert table.start(WHOLE, retry_at - 0.001) == ()
        pauses.append(retry_at - now)
        now = retry_at
    assert pauses[0] == FIRST_RETRY_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_RETRY_SECONDS
    table.succeeded(the_only(table.start(WHOLE, now)), 0.5, now)
    assert table.outcomes() == (READY_B,)


def test_a_route_without_room_is_neither_ready_nor_failed() -> None:
    table = ProbeTable("a")
    table.postponed(the_only(table.start(WHOLE, 0.0)), 0.0)
    assert table.outcomes() == ()
    assert table.retry_at() == FIRST_RETRY_SECONDS
    assert len(table.start(WHOLE, FIRST_RETRY_SECONDS)) == 1


def test_a_hop_failure_under_a_generation_takes_the_proof_back_and_probes_at_once() -> None:
    table = proven()
    table.generation_failed("m", "b", "b is gone", 7.0)
    assert table.outcomes() == (RouteProbe("m", THROUGH_B, "layers 4-12 do not answer: b is gone"),)
    assert table.retry_at() == 7.0
    table.succeeded(the_only(table.start(WHOLE, 7.0)), 0.5, 7.0)
    assert table.outcomes() == (READY_B,)


def test_a_generation_that_fails_on_an_unproven_route_does_not_shorten_the_pause() -> None:
    table = ProbeTable("a")
    table.failed(the_only(table.start(WHOLE, 0.0)), "mute", 0.0)
    table.generation_failed("m", "b", "b is gone", 0.5)
    table.generation_failed("other", "b", "b is gone", 0.5)
    assert table.retry_at() == FIRST_RETRY_SECONDS


def test_every_replica_is_proven_and_the_ready_route_is_used_until_then() -> None:
    table = proven()
    both = models.topology(A, B, C)
    assert table.choose(both, "m", NO_WISH) == THROUGH_B
    probe = the_only(table.start(both, 1.0))
    assert probe.route == THROUGH_C
    # Now b is the busier one, but no token has come through c yet.
    turned = models.topology(A, replace(B, num_sessions=5), C)
    assert table.choose(turned, "m", NO_WISH) == THROUGH_B
    table.failed(probe, "mute", 1.0)
    assert table.outcomes() == (READY_B,)
    assert table.choose(turned, "m", NO_WISH) == THROUGH_B
    table.succeeded(the_only(table.start(turned, 9.0)), 0.25, 9.0)
    assert table.choose(turned, "m", NO_WISH) == THROUGH_C
    # The sessions that this node has begun there and the topology does not show.
    assert table.choose(turned, "m", Wish(extra_load={"c": 9})) == THROUGH_B
    assert {table.choose(both, "m", Wish(spread)) for spread in range(20)} == {THROUGH_B, THROUGH_C}
    assert table.start(turned, 10.0) == ()


def test_a_hop_failure_takes_the_proof_of_all_routes_through_that_node_back() -> None:
    table = ProbeTable("a")
    d = models.node("d", (8, 12))
    mesh = models.topology(A, models.node("b", (4, 8)), models.node("c", (4, 8)), d)
    for probe in table.start(mesh, 0.0):
        table.succeeded(probe, 0.5, 0.0)
    assert {probe.route[1].node_id for probe in table.start(mesh, REFRESH_SECONDS)} == {"b", "c"}
    table.generation_failed("m", "d", "d is gone", 1.0)
    assert [outcome.failure for outcome in table.outcomes()] == ["layers 8-12 do not answer: d is gone"]


def test_few_probes_are_under_way_at_once_and_what_is_not_ready_comes_first() -> None:
    table = ProbeTable("a")
    mesh = models.topology(A, *(models.node(f"n{index}", (4, 12)) for index in range(20)))
    first = table.start(mesh, 0.0)
    assert len(first) == MAX_AT_ONCE
    assert table.retry_at() is None
    assert table.start(mesh, 0.0) == ()
    for probe in first:
        table.succeeded(probe, 0.5, 0.0)
    second = table.start(mesh, REFRESH_SECONDS)
    assert {probe.route for probe in second}.isdisjoint(probe.route for probe in first)
    assert len({probe.route for probe in (*first, *second)}) == MAX_ROUTES


def test_a_route_is_forgotten_with_its_hop_and_proven_anew() -> None:
    table = proven()
    assert table.choose(models.topology(A, C), "m", NO_WISH) == THROUGH_C
    assert table.start(models.topology(A), 1.0) == ()
    assert table.outcomes() == ()
    assert len(table.start(WHOLE, 2.0)) == 1
    assert table.outcomes() == ()


def test_a_probe_from_before_its_route_was_forgotten_counts_no_more() -> None:
    table = ProbeTable("a")
    old = the_only(table.start(WHOLE, 0.0))
    table.start(models.topology(A), 1.0)
    new = the_only(table.start(WHOLE, 2.0))
    table.failed(old, "mute", 3.0)
    assert table.outcomes() == ()
    table.succeeded(new, 0.5, 3.0)
    table.failed(old, "mute", 4.0)
    assert table.outcomes() == (READY_B,)


def test_what_is_remembered_is_bounded() -> None:
    table = ProbeTable("a")
    others = [models.node(f"n{index}", (4, 12)) for index in range(100)]
    for index in range(len(others)):
        # Each in turn is the one that is not suspect.
        nodes = [replace(node, alive=number == index) for number, node in enumerate(others)]
        table.succeeded(the_only(table.start(models.topology(A, *nodes), 0.0)), 0.5, 0.0)
    back = [replace(node, alive=number == 99 - MAX_REMEMBERED) for number, node in enumerate(others)]
    assert table.start(models.topology(A, *back), 1.0) == ()
    back = [replace(node, alive=number == 0) for number, node in enumerate(others)]
    assert len(table.start(models.topology(A, *back), 1.0)) == 1
