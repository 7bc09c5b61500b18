"""The simulator: traces come from a seed, the truth agrees with a count from scratch, strategies keep to room."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.mesh_churn.__main__ import STRATEGIES
from benchmarks.mesh_churn.__main__ import run as run_strategy
from benchmarks.mesh_churn.catalogue import Catalogue, catalogue, model_ids
from benchmarks.mesh_churn.hardware import mean_vram_bytes
from benchmarks.mesh_churn.ours import Ours
from benchmarks.mesh_churn.summary import ROWS, table
from benchmarks.mesh_churn.trace import Churn, EventKind, Trace, draw_trace
from benchmarks.mesh_churn.world import World
from services.tracker.placement import WORKSPACE_BYTES

CHURN = Churn(
    hours=0.5, warmup_seconds=600.0, hourly=1.0, clean_share=0.5, silences_hourly=4.0, overstated=0.2, files=2
)
NUM_NODES = 24


@pytest.fixture(scope="module")
def models() -> Catalogue:
    return catalogue(3, int(NUM_NODES * mean_vram_bytes()), 3.0, 65_536)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return draw_trace(5, NUM_NODES, model_ids(3), CHURN)


@pytest.fixture(scope="module", params=STRATEGIES)
def world(request: pytest.FixtureRequest, trace: Trace, models: Catalogue) -> World:
    world = World(trace, models)
    world.start(STRATEGIES[request.param](world, trace.seed))
    world.clock.run_until(CHURN.end)
    return world


def test_a_seed_fixes_the_trace(trace: Trace) -> None:
    assert draw_trace(5, NUM_NODES, model_ids(3), CHURN) == trace
    assert draw_trace(6, NUM_NODES, model_ids(3), CHURN) != trace


def test_a_trace_tells_of_each_machine_in_turn(trace: Trace) -> None:
    up: set[str] = set()
    for event in trace.events:
        if event.kind is EventKind.JOINS:
            assert event.node_id not in up
            up.add(event.node_id)
        elif event.kind in (EventKind.LEAVES, EventKind.DIES):
            assert event.at >= CHURN.warmup_seconds
            up.remove(event.node_id)
    assert {event.kind for event in trace.events} == set(EventKind)


def test_the_truth_is_what_the_running_nodes_hold(world: World, models: Catalogue) -> None:
    counted = Counter(layer for node in world.nodes.values() for layer in node.layers)
    for model_id, sizes in models.items():
        replicas = [counted[model_id, layer] for layer in range(sizes.num_layers)]
        assert world.truth.replicas[model_id] == replicas
        assert world.truth.covered(model_id) == all(replicas)
        rates = [
            sum(1 / n.seconds_a_token(models) for n in world.nodes.values() if layer in n.held.get(model_id, {}))
            for layer in range(sizes.num_layers)
        ]
        assert world.truth.rates[model_id] == pytest.approx(rates)


def test_no_node_holds_more_than_it_has(world: World, models: Catalogue) -> None:
    assert any(node.held for node in world.nodes.values())
    for node in world.nodes.values():
        assert WORKSPACE_BYTES <= node.used_bytes(models) <= node.spec.true_bytes


def test_the_tracker_knows_who_is_here(trace: Trace, models: Catalogue) -> None:
    world = World(trace, models)
    ours = Ours(world)
    world.start(ours)
    world.clock.run_until(CHURN.end)
    missing = world.nodes.keys() - ours.mesh.topology.nodes.keys()
    assert all(world.nodes[node_id].silent for node_id in missing)
    assert ours.seconds["departure"]


def test_every_row_of_the_table_has_a_figure(trace: Trace, models: Catalogue) -> None:
    result = run_strategy("weakest", trace, models, 3.0)
    assert table([result], "").row_count == len(ROWS)
    assert 0 < min(result.coverage().values()) <= 1
    ends = [e for e in trace.events if e.kind in (EventKind.LEAVES, EventKind.DIES) and e.at <= CHURN.end]
    assert result.tally.departures == len(ends)
