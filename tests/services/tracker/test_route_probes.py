"""What entry nodes tell of their routes: checked, published at once, and listed with the routes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshnet import convert
from meshnet.errors import InvalidRequest
from meshnet.model import LayerRange
from meshnet.topology import NOT_PROBED, Hop, RouteProbe
from meshnet.v1 import admin_pb2, common_pb2
from services.tracker.admin_servicer import AdminServicer
from services.tracker.config import Config
from services.tracker.mesh import Mesh
from services.tracker.store import MemoryStore
from services.tracker.tracker import Tracker
from tests.services.tracker.meshes import MB, manifest, node, shard

LATER = 1000.0
ROUTE = (Hop("a", LayerRange(0, 10)),)
READY = RouteProbe("m", ROUTE, latency_seconds=0.5)
FAILED = RouteProbe("m", ROUTE, "no token came back")


@pytest.fixture
async def tracker() -> Tracker:
    """Its mesh has one node that serves the whole model."""
    tracker = Tracker(Config("127.0.0.1", 0, deploy=("m",)), MemoryStore())
    lends = node("a", 40 * MB, shards=[shard(0, 10)])
    tracker.mesh.register(lends, "i", [manifest(num_layers=10)], LATER)
    return tracker


def heartbeat(mesh: Mesh, *probes: RouteProbe) -> bool:
    """Whether it made a new topology."""
    shards = mesh.registry.nodes()["a"].shards
    return mesh.heartbeat("a", "i", shards, LATER, probes=probes).topology_changed


async def test_a_new_outcome_is_published_at_once_and_an_old_one_is_not(tracker: Tracker) -> None:
    mesh = tracker.mesh
    assert mesh.topology.probes("m") == ()
    for outcome in (FAILED, READY):
        assert heartbeat(mesh, outcome)
        assert mesh.topology.probes("m") == (outcome,)
        assert not heartbeat(mesh, outcome)


async def test_a_node_that_registers_brings_its_outcomes(tracker: Tracker) -> None:
    lends = replace(tracker.mesh.registry.nodes()["a"], probes=(READY,))
    tracker.mesh.register(lends, "i", [manifest(num_layers=10)], LATER)
    assert tracker.mesh.topology.probes("m") == (READY,)


async def test_an_outcome_whose_route_no_longer_stands_does_not_count(tracker: Tracker) -> None:
    beyond = replace(READY, hops=(Hop("a", LayerRange(0, 5)), Hop("gone", LayerRange(5, 10))))
    heartbeat(tracker.mesh, beyond)
    assert tracker.mesh.topology.nodes["a"].probes == (beyond,)
    assert tracker.mesh.topology.probes("m") == ()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((READY, READY), "more than one"),
        ((replace(READY, hops=()),), "begin there"),
        ((replace(READY, hops=(Hop("b", LayerRange(0, 10)),)),), "begin there"),
        ((replace(FAILED, failure="x" * 2001),), "2000"),
    ],
)
async def test_outcomes_without_sense_are_refused(tracker: Tracker, wrong: tuple[RouteProbe, ...], said: str) -> None:
    heartbeat(tracker.mesh, READY)
    before = tracker.mesh.topology
    with pytest.raises(InvalidRequest, match=said):
        heartbeat(tracker.mesh, *wrong)
    with pytest.raises(InvalidRequest, match=said):
        tracker.mesh.register(replace(before.nodes["a"], probes=wrong), "i", [manifest(num_layers=10)], LATER)
    tracker.mesh.tick(LATER)
    assert tracker.mesh.topology == before


async def test_list_routes_tells_what_is_known_of_each(tracker: Tracker) -> None:
    async def listed() -> admin_pb2.Route:
        answer = await AdminServicer(tracker).ListRoutes(admin_pb2.ListRoutesRequest(), None)
        route: admin_pb2.Route
        (route,) = answer.routes
        assert [(hop.node_id, hop.layers.start, hop.layers.end) for hop in route.hops] == [("a", 0, 10)]
        return route

    assert ((route := await listed()).ready, route.failure) == (False, NOT_PROBED)
    heartbeat(tracker.mesh, FAILED)
    assert ((route := await listed()).ready, route.failure) == (False, FAILED.failure)
    assert not route.HasField("latency_seconds")
    heartbeat(tracker.mesh, READY)
    assert ((route := await listed()).ready, route.failure, route.latency_seconds) == (True, "", 0.5)


@pytest.mark.parametrize("probe", [READY, FAILED])
def test_outcomes_cross_the_wire(probe: RouteProbe) -> None:
    assert convert.probe_from_proto(convert.probe_to_proto(probe)) == probe


@pytest.mark.parametrize("latency", [-1.0, math.nan, math.inf])
def test_a_latency_without_sense_is_refused(latency: float) -> None:
    with pytest.raises(InvalidRequest):
        convert.probe_from_proto(common_pb2.RouteProbe(model_id="m", latency_seconds=latency))
