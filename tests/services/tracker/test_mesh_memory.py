"""What a mesh asks to be saved, and what it does with it after a restart."""

from __future__ import annotations

from itertools import count

import pytest

from meshnet.errors import InvalidRequest
from meshnet.model import LayerRange
from meshnet.topology import ShardState
from services.tracker.effects import Effects, Settings
from services.tracker.mesh import Mesh
from services.tracker.remembered import (
    Assignment,
    ForgetNode,
    Remembered,
    SaveModel,
    SaveNode,
    SaveUndeployed,
)
from services.tracker.store import MemoryStore
from tests.services.tracker.meshes import MB, deployed, manifest, node, shard
from tests.services.tracker.test_mesh import KV_ROOM, LATER, brief, finish_all, join, served_mesh, texts

MODEL = deployed(kv_tokens=1024)
FIRST = (Assignment("m", LayerRange(0, 15)),)
LAST = (Assignment("m", LayerRange(15, 30)),)


def restarted(remembered: Remembered, *auto_deploy: str) -> Mesh:
    """At time 0, long before which the other run ended."""
    ids = count(1)
    return Mesh(Settings(auto_deploy=auto_deploy), lambda: f"d{next(ids)}", first_version=500, remembered=remembered)


def test_a_deploy_and_what_it_assigns_are_saved() -> None:
    mesh = restarted(Remembered())
    assert join(mesh, "n1", 30 * MB).saves == (SaveNode("n1", ()),)
    effects = mesh.deploy("m", 0, 5, LATER)
    ordered = SaveNode("n1", (Assignment("m", LayerRange(0, 30)),))
    assert effects.saves == (SaveModel(deployed(kv_tokens=1024, priority=5)), ordered)
    assert mesh.deploy("m", 0, 5, LATER).saves == ()


def test_progress_and_counters_are_not_saved() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    shards = mesh.registry.nodes()["n1"].shards
    mesh.heartbeat("n1", "i", shards, LATER + 3, num_sessions=4)
    tick = mesh.tick(LATER + 4)
    assert tick.topology_changed
    assert tick.saves == ()


def test_nodes_that_leave_or_are_lost_are_forgotten() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    assert ForgetNode("n1") in mesh.leave("n1", "i", LATER).saves
    assert {ForgetNode("n2"), ForgetNode("n3")} <= set(mesh.tick(LATER + 15).saves)


def test_all_saves_of_a_run_are_its_state() -> None:
    store = MemoryStore()
    mesh = restarted(Remembered(), "m")
    for effects in (join(mesh, "n1"), join(mesh, "n2"), join(mesh, "n3")):
        store.save(effects.saves)
    remembered = store.load()
    assert remembered.models == {"m": MODEL}
    assert {i: [str(a.layers) for a in held] for i, held in remembered.nodes.items()} == {
        "n1": ["0-10"],
        "n2": ["10-20"],
        "n3": ["20-30"],
    }


def test_after_a_restart_models_are_there_and_nothing_is_reloaded() -> None:
    mesh = restarted(Remembered({"m": MODEL}, nodes={"n1": FIRST, "n2": LAST}))
    assert mesh.topology.models == {"m": MODEL}
    assert "model m is deployed, as before the restart" in texts(mesh.tick(0.5))
    assert join(mesh, "spare", 30 * MB, now=1.0).directives == ()
    assert join(mesh, "n1", 15 * MB, [shard(0, 15)], now=2.0).directives == ()
    last = join(mesh, "n2", 15 * MB, [shard(15, 30)], now=3.0)
    assert mesh.topology.coverage("m").complete
    # All are back: what is ordered now is redundancy on the spare node.
    assert brief(last.directives) == [("spare", "LOAD_SHARD", "0-30")]


def test_a_load_goes_on_through_a_restart() -> None:
    mesh = restarted(Remembered({"m": MODEL}, nodes={"n1": FIRST, "n2": LAST}))
    join(mesh, "n1", 15 * MB, [shard(0, 15)], now=1.0)
    back = join(mesh, "n2", 15 * MB, [shard(15, 30, state=ShardState.LOADING)], now=2.0)
    assert back.directives == ()
    done = mesh.heartbeat("n2", "i", [shard(15, 30)], 5.0)
    assert done.directives == ()
    assert mesh.topology.coverage("m").complete


def test_what_did_not_come_back_is_placed_again_and_forgotten() -> None:
    mesh = restarted(Remembered({"m": MODEL}, nodes={"n1": FIRST, "n2": LAST}))
    early = join(mesh, "n1", 30 * MB, [shard(0, 15)], now=1.0)
    assert early.directives == ()
    assert not any(isinstance(save, ForgetNode) for save in (*early.saves, *mesh.tick(7.9).saves))
    after = mesh.tick(8.0)
    assert brief(after.directives) == [("n1", "LOAD_SHARD", "15-30")]
    assert ForgetNode("n2") in after.saves


def test_a_heartbeat_at_the_end_of_the_pause_does_not_swallow_the_plan() -> None:
    mesh = restarted(Remembered({"m": MODEL}, nodes={"n1": FIRST, "n2": LAST}))
    join(mesh, "n1", 30 * MB, [shard(0, 15)], now=1.0)
    mesh.heartbeat("n1", "i", [shard(0, 15)], 8.1)
    assert brief(mesh.tick(8.5).directives) == [("n1", "LOAD_SHARD", "15-30")]


def test_the_saved_revision_is_the_one_that_is_served() -> None:
    mesh = restarted(Remembered({"m": MODEL}))
    other = mesh.register(node("n1", 31 * MB), "i", [manifest(revision="r2")], LATER)
    assert "another revision of m" in texts(other)
    assert other.directives == ()
    assert brief(join(mesh, "n2", 31 * MB).directives) == [("n2", "LOAD_SHARD", "0-30")]


def test_an_undeploy_outlives_the_flag_that_deploys() -> None:
    first = served_mesh("n1", "n2", "n3")
    assert SaveUndeployed("m") in first.undeploy("m", LATER).saves
    mesh = restarted(Remembered(undeployed=frozenset({"m"})), "m")
    assert "stays undeployed" in texts(join(mesh, "n1", 30 * MB))
    assert mesh.topology.models == {}
    assert SaveModel(MODEL) in mesh.deploy("m", 0, 0, LATER).saves
    assert mesh.topology.models == {"m": MODEL}


def test_a_saved_promise_is_kept_whatever_the_flags_say() -> None:
    mesh = Mesh(Settings(auto_deploy=("m",), auto_kv_tokens=16), lambda: "d", remembered=Remembered({"m": MODEL}))
    effects: Effects = mesh.register(node("n1", 30 * MB + KV_ROOM), "i", [manifest()], LATER)
    assert effects.directives[0].kv_tokens == 1024
    finish_all(mesh)
    assert mesh.deployed("m") == MODEL


def test_an_evicted_process_is_refused_after_a_restart_too() -> None:
    mesh = served_mesh("n1", "n2")
    store = MemoryStore()
    store.save(mesh.evict("n2", LATER).saves)
    assert store.load().evicted == {"n2": "i"}
    again = restarted(store.load())
    with pytest.raises(InvalidRequest, match="was evicted"):
        join(again, "n2")
    join(again, "n2", incarnation="a new process")
    with pytest.raises(InvalidRequest, match="was evicted"):
        join(again, "n2")
