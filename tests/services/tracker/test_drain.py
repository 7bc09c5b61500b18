"""Taking a node away: drained with care, or evicted at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.directive import DirectiveKind, DirectiveState
from meshnet.errors import InvalidRequest, Unregistered
from services.tracker.mesh import Mesh
from services.tracker.placement import plan
from services.tracker.remembered import ForgetNode, Remembered, SaveNode
from tests.services.tracker.meshes import MB, deployed, drops, loads, node, obey, ready_replicas, shard
from tests.services.tracker.test_mesh import LATER, brief, finish, finish_all, join, served_mesh, texts
from tests.services.tracker.test_mesh_memory import FIRST, LAST, MODEL, restarted


def mesh_with_spare() -> Mesh:
    """n1, n2 and n3 serve ten layers each; n4 has room for twelve and holds nothing."""
    mesh = served_mesh("n1", "n2", "n3")
    mesh.deploy("m", 0, 0, LATER, replicas=1)
    join(mesh, "n4")
    assert mesh.ledger.nodes_with_open() == ()
    return mesh


def test_layers_are_served_elsewhere_before_they_are_dropped() -> None:
    mesh = mesh_with_spare()
    drained = mesh.drain("n2", LATER)
    assert brief(drained.directives) == [("n4", "LOAD_SHARD", "10-20")]
    assert drained.directives[0].reason == "layers 10-20 of m move off a node that is drained"
    assert mesh.topology.nodes["n2"].draining
    assert mesh.topology.coverage("m").complete
    moved = finish(mesh, drained.directives[0])
    assert brief(moved.directives) == [("n2", "DROP_SHARD", "10-20")]
    assert mesh.topology.coverage("m").complete
    finish_all(mesh)
    assert mesh.topology.nodes["n2"].shards == ()
    assert mesh.topology.coverage("m").complete
    assert brief(join(mesh, "n5").directives) == []


def test_what_fits_nowhere_stays() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    drained = mesh.drain("n2", LATER)
    assert brief(drained.directives) == []
    assert "fit on no node" in mesh.plan.shortfall("m")
    assert mesh.topology.coverage("m").complete
    later = join(mesh, "n4")
    assert brief(later.directives) == [("n4", "LOAD_SHARD", "10-20")]


def test_a_failed_move_leaves_the_layers_where_they_are() -> None:
    mesh = mesh_with_spare()
    (load,) = mesh.drain("n2", LATER).directives
    failed = mesh.report("n4", "i", load.directive_id, DirectiveState.FAILED, (), LATER, failure="out of memory")
    assert all(d.kind is not DirectiveKind.DROP_SHARD for d in failed.directives)
    assert mesh.topology.coverage("m").complete


def test_a_drain_can_be_cancelled() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    mesh.drain("n2", LATER)
    assert "n2 is no longer drained" in texts(mesh.drain("n2", LATER, cancel=True))
    assert not mesh.topology.nodes["n2"].draining
    assert mesh.plan.shortfall("m") == ""


def test_a_drain_ends_with_the_process() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    mesh.drain("n2", LATER)
    join(mesh, "n2", incarnation="i2")
    assert not mesh.topology.nodes["n2"].draining
    mesh.drain("n2", LATER)
    mesh.leave("n2", "i2", LATER)
    join(mesh, "n2", incarnation="i3")
    assert not mesh.topology.nodes["n2"].draining


def test_a_drain_outlives_the_tracker() -> None:
    first = served_mesh("n1", "n2", "n3")
    (save,) = first.drain("n2", LATER).saves
    assert isinstance(save, SaveNode)
    assert save.draining
    mesh = restarted(Remembered({"m": MODEL}, nodes={"n1": FIRST, "n2": LAST}, draining=frozenset({"n2"})))
    join(mesh, "n2", 15 * MB, [shard(15, 30)], now=1.0)
    back = join(mesh, "n1", 30 * MB, [shard(0, 15)], now=2.0)
    assert mesh.topology.nodes["n2"].draining
    assert brief(back.directives) == [("n1", "LOAD_SHARD", "15-30")]


def test_an_evicted_node_is_forgotten_and_its_process_refused() -> None:
    mesh = mesh_with_spare()
    evicted = mesh.evict("n2", LATER)
    assert "n2" not in mesh.topology.nodes
    assert brief(evicted.directives) == [("n4", "LOAD_SHARD", "10-20")]
    assert ForgetNode("n2") in evicted.saves
    with pytest.raises(Unregistered):
        mesh.heartbeat("n2", "i", (), LATER)
    with pytest.raises(InvalidRequest, match="was evicted from this mesh: start it again"):
        join(mesh, "n2")
    join(mesh, "n2", incarnation="i2")
    assert "n2" in mesh.topology.nodes


def test_nodes_that_are_not_here_are_named() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    with pytest.raises(Unregistered, match="'n7' is not registered; nodes: n1, n2, n3"):
        mesh.drain("n7", LATER)
    with pytest.raises(Unregistered, match="nodes: n1, n2, n3"):
        mesh.evict("n7", LATER)


def test_a_gap_is_filled_before_a_drained_node_is_relieved() -> None:
    nodes = [
        replace(node("n1", 10 * MB, shards=[shard(0, 10)]), draining=True),
        node("n2", 10 * MB),
    ]
    result = plan(nodes, [deployed("m", 20)])
    assert loads(result) == [("n2", "10-20")]
    assert drops(result) == []
    assert "layers 0-10 of m" in result.shortfall("m")


ROOMS = st.lists(st.integers(0, 12), min_size=2, max_size=5)


@given(ROOMS, st.data())
def test_no_layer_is_lost_while_nodes_are_drained(rooms: list[int], data: st.DataObject) -> None:
    model = deployed("m", 8)
    nodes = obey(bare := [node(f"n{i}", room * MB) for i, room in enumerate(rooms)], plan(bare, [model]).drafts)
    served = set(ready_replicas(nodes))
    drained = data.draw(st.sets(st.sampled_from([n.node_id for n in nodes])))
    nodes = [replace(n, draining=n.node_id in drained) for n in nodes]
    held = {n.node_id: n.layers("m") for n in nodes}
    for _ in range(6):
        result = plan(nodes, [model])
        nodes = obey(nodes, result.drafts)
        assert served <= set(ready_replicas(nodes))
        assert all(n.layers("m") <= held[n.node_id] for n in nodes if n.draining)
        if not result.drafts:
            break
    assert plan(nodes, [model]).drafts == ()
    if not result.shortfalls:
        assert all(not n.layers("m") for n in nodes if n.draining)
