"""A node that is not heard: suspect first, then lost."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from meshnet.errors import Unregistered
from meshnet.routing import find_route
from services.tracker.effects import Effects
from services.tracker.mesh import Mesh
from services.tracker.placement import plan
from tests.services.tracker.meshes import MB, deployed, drops, loads, node, shard
from tests.services.tracker.test_mesh import LATER, all_open, brief, finish_all, join, make_mesh, served_mesh, texts

HEARTBEAT, SUSPECT, LEASE = 3.0, 7.5, 15.0


def beat(mesh: Mesh, now: float, *node_ids: str) -> Effects:
    effects = Effects()
    for node_id in node_ids:
        effects = mesh.heartbeat(node_id, "i", mesh.registry.nodes()[node_id].shards, now)
    return effects


def alive(mesh: Mesh) -> list[str]:
    return [node_id for node_id, n in mesh.topology.nodes.items() if n.alive]


def test_one_late_heartbeat_is_nothing() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    assert mesh.tick(LATER + 2 * HEARTBEAT + 1) == Effects()
    assert alive(mesh) == ["n1", "n2", "n3"]


def test_a_suspect_keeps_its_layers_and_nothing_is_ordered() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    join(mesh, "n4")
    finish_all(mesh)
    beat(mesh, LATER + 6, "n1", "n3", "n4")
    suspected = mesh.tick(LATER + SUSPECT)
    assert suspected.topology_changed
    assert suspected.directives == ()
    assert suspected.saves == ()
    assert [n.text for n in suspected.notes] == ["node n2 is suspect: nothing heard from it for 7.5 s"]
    assert suspected.notes[0].level == logging.WARNING
    assert alive(mesh) == ["n1", "n3", "n4"]
    assert mesh.topology.coverage("m").complete
    # Nor when something else makes a new plan.
    assert brief(join(mesh, "n5", now=LATER + 8).directives) != []
    assert all(d.node_id != "n2" and "have no node" not in d.reason for d in all_open(mesh))
    assert mesh.tick(LATER + 9) == Effects()


def test_a_suspect_that_is_heard_is_alive_at_once() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    beat(mesh, LATER + 6, "n1", "n3")
    mesh.tick(LATER + SUSPECT)
    back = beat(mesh, LATER + 9, "n2")
    assert back.topology_changed
    assert back.directives == ()
    assert texts(back) == "node n2 is heard again"
    assert alive(mesh) == ["n1", "n2", "n3"]


def test_a_suspect_that_registers_again_is_alive_at_once() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    mesh.tick(LATER + SUSPECT)
    assert alive(mesh) == []
    join(mesh, "n2", shards=mesh.registry.nodes()["n2"].shards, now=LATER + 9)
    assert alive(mesh) == ["n2"]


def test_a_report_is_as_good_as_a_heartbeat() -> None:
    mesh = make_mesh("m")
    join(mesh, "n1", 30 * MB)
    mesh.tick(LATER + SUSPECT)
    finish_all(mesh, LATER + 9)
    assert alive(mesh) == ["n1"]


def test_a_suspect_is_lost_at_the_end_of_its_lease() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    beat(mesh, LATER + 7, "n1", "n3")
    mesh.tick(LATER + SUSPECT)
    mesh.tick(LATER + LEASE - 0.1)
    assert not mesh.topology.nodes["n2"].alive
    lost = mesh.tick(LATER + LEASE)
    assert "node n2 lost" in texts(lost)
    assert "n2" not in mesh.topology.nodes
    with pytest.raises(Unregistered):
        mesh.heartbeat("n2", "i", (), LATER + LEASE)


def test_what_waited_for_a_suspects_room_is_placed_when_it_is_heard() -> None:
    mesh = make_mesh("m")
    join(mesh, "n1", 15 * MB)
    mesh.tick(LATER + SUSPECT)
    assert join(mesh, "n2", 15 * MB, now=LATER + 8).directives == ()
    back = beat(mesh, LATER + 9, "n1")
    assert brief(back.directives) == [("n1", "LOAD_SHARD", "0-15"), ("n2", "LOAD_SHARD", "15-30")]


def test_routes_pass_a_suspect_only_where_no_other_serves() -> None:
    mesh = make_mesh("m")
    join(mesh, "n1", 15 * MB, [shard(0, 15)])
    join(mesh, "n2", 15 * MB, [shard(15, 30)])
    join(mesh, "n3", 15 * MB, [shard(15, 30)])
    beat(mesh, LATER + 6, "n1", "n3")
    mesh.tick(LATER + SUSPECT)
    assert [hop.node_id for hop in find_route(mesh.topology, "m", "n1")] == ["n1", "n3"]
    mesh.leave("n3", "i", LATER + 8)
    assert [hop.node_id for hop in find_route(mesh.topology, "m", "n1")] == ["n1", "n2"]


def test_a_suspect_makes_no_other_replica_redundant() -> None:
    model = deployed("m", 10)
    other = deployed("x", 10)
    whole = [shard(0, 10)]
    nodes = [node("a", 10 * MB, "m", "x", shards=whole), node("b", 10 * MB, "m", "x", shards=whole)]
    assert loads(plan(nodes, [model, other])) == [("a", "0-10")]
    assert drops(plan(nodes, [model, other])) == [("a", "0-10")]
    one_suspect = [nodes[0], replace(nodes[1], alive=False)]
    result = plan(one_suspect, [model, other])
    assert result.drafts == ()
    assert "layers 0-10 of x" in result.shortfall("x")
