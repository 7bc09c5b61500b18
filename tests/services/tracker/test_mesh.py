"""The whole state with a virtual clock: what each event makes the tracker order, publish and log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest

from meshnet.directive import Directive, DirectiveKind, DirectiveState
from meshnet.errors import InvalidRequest, UnknownModel, Unregistered
from meshnet.model import KvPrecision, LayerRange
from meshnet.topology import Shard, ShardState
from services.tracker.effects import Effects, Settings
from services.tracker.mesh import Mesh
from services.tracker.placement import WORKSPACE_BYTES
from services.tracker.view import settled
from tests.services.tracker.meshes import MB, manifest, node, shard

READY, LOADING, FAILED, DROPPED = (
    DirectiveState.READY,
    DirectiveState.LOADING,
    DirectiveState.FAILED,
    DirectiveState.DROPPED,
)
# Long after the start, when the pause for a restarted tracker is over.
LATER = 1000.0
# For the KV cache: 1024 tokens at one byte a layer.
KV_ROOM = 100_000


def make_mesh(*auto_deploy: str, first_version: int = 0) -> Mesh:
    ids = count(1)
    return Mesh(Settings(auto_deploy=auto_deploy), lambda: f"d{next(ids)}", first_version=first_version)


def join(
    mesh: Mesh,
    node_id: str,
    room: int = 12 * MB,
    shards: Sequence[Shard] = (),
    incarnation: str = "i",
    now: float = LATER,
) -> Effects:
    return mesh.register(node(node_id, room + KV_ROOM, shards=shards), incarnation, [manifest()], now)


def finish(mesh: Mesh, directive: Directive, state: DirectiveState = READY, now: float = LATER) -> Effects:
    """A report as a node makes it: with the shards that it then holds."""
    held = mesh.registry.nodes()[directive.node_id].shards
    shards = settled(held, directive.advance(state))
    return mesh.report(directive.node_id, "i", directive.directive_id, state, shards, now)


def all_open(mesh: Mesh) -> list[Directive]:
    """In the order of issue."""
    return [directive for directive in mesh.ledger.all() if not directive.state.is_final]


def finish_all(mesh: Mesh, now: float = LATER) -> None:
    """Obeys open directives, and those that this causes, until there are none."""
    for _ in range(20):
        for directive in all_open(mesh):
            finish(mesh, directive, READY if directive.kind is DirectiveKind.LOAD_SHARD else DROPPED, now)
        if not all_open(mesh):
            return
    raise AssertionError("directives without end")


def brief(directives: Sequence[Directive]) -> list[tuple[str, str, str]]:
    return [(d.node_id, d.kind.value, str(d.layers)) for d in directives]


def texts(effects: Effects) -> str:
    return "\n".join(note.text for note in effects.notes)


def served_mesh(*node_ids: str) -> Mesh:
    mesh = make_mesh("m")
    for node_id in node_ids:
        join(mesh, node_id)
    finish_all(mesh)
    return mesh


def test_nothing_is_loaded_until_the_whole_model_fits() -> None:
    mesh = make_mesh("m")
    assert join(mesh, "n1").directives == ()
    second = join(mesh, "n2")
    assert second.directives == ()
    assert "layers 24-30 of m" in mesh.plan.shortfall("m")
    assert "cannot be placed" in texts(second)
    third = join(mesh, "n3")
    assert brief(third.directives) == [
        ("n1", "LOAD_SHARD", "0-10"),
        ("n2", "LOAD_SHARD", "10-20"),
        ("n3", "LOAD_SHARD", "20-30"),
    ]
    assert mesh.plan.shortfall("m") == ""
    assert {d.plan_version for d in third.directives} == {1}
    assert "node n3 joined" in texts(third)
    assert "directive issued: LOAD_SHARD m 20-30 on n3: layers 20-30 of m have no node" in texts(third)


def test_ordered_layers_are_loading_until_they_are_ready() -> None:
    mesh = make_mesh("m")
    (directive,) = join(mesh, "n1", 30 * MB).directives
    coverage = mesh.topology.coverage("m")
    assert [(str(s.layers), s.ready, s.loading) for s in coverage.spans] == [("0-30", (), ("n1",))]
    progress = [replace(shard(0, 30, state=ShardState.LOADING), bytes_done=5, bytes_total=30)]
    assert mesh.report("n1", "i", "d1", LOADING, progress, LATER, bytes_done=5, bytes_total=30).topology_changed
    assert mesh.topology.nodes["n1"].shards[0].bytes_done == 5
    done = finish(mesh, directive)
    assert mesh.topology.coverage("m").complete
    assert "model m covered" in texts(done)
    assert "LOAD_SHARD m 0-30 on n1 is READY" in texts(done)


def test_versions_grow_only_with_changes() -> None:
    mesh = make_mesh("m", first_version=500)
    join(mesh, "n1", 30 * MB)
    version = mesh.topology.version
    assert version > 500
    assert not mesh.tick(LATER + 1).topology_changed
    assert mesh.topology.version == version


def test_a_lost_node_is_replaced_from_spare_room() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    join(mesh, "n4")
    finish_all(mesh)
    for node_id in ("n1", "n3", "n4"):
        mesh.heartbeat(node_id, "i", mesh.registry.nodes()[node_id].shards, LATER + 10)
    lost = mesh.tick(LATER + 15)
    assert "node n2 lost" in texts(lost)
    assert "uncovered: layers 12-20" in texts(lost)
    assert [d.node_id for d in lost.directives] == ["n1", "n1"]
    finish_all(mesh, LATER + 16)
    assert mesh.topology.coverage("m").complete
    assert "n2" not in mesh.topology.nodes


def test_dropped_layers_are_off_the_topology_at_once() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    undeployed = mesh.undeploy("m", LATER)
    assert [d.kind for d in undeployed.directives] == [DirectiveKind.DROP_SHARD] * 3
    assert all(n.shards == () for n in mesh.topology.nodes.values())
    assert mesh.topology.models == {}
    finish_all(mesh)
    assert all(n.shards == () for n in mesh.registry.nodes().values())
    with pytest.raises(UnknownModel, match="not deployed"):
        mesh.undeploy("m", LATER)


def test_redeploying_while_drops_are_open_loads_after_them() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    mesh.undeploy("m", LATER)
    again = mesh.deploy("m", 0, 0, LATER)
    assert [d.kind for d in mesh.ledger.open("n1")] == [DirectiveKind.DROP_SHARD, DirectiveKind.LOAD_SHARD]
    assert len(again.directives) == 3
    assert mesh.topology.coverage("m").spans[0].loading == ("n1",)
    finish_all(mesh)
    assert mesh.topology.coverage("m").complete


def test_a_failed_load_lowers_the_belief_and_is_not_repeated() -> None:
    mesh = make_mesh("m")
    (directive,) = join(mesh, "n1", 30 * MB).directives
    failed = mesh.report("n1", "i", directive.directive_id, FAILED, (), LATER, failure="out of memory")
    assert failed.directives == ()
    assert "out of memory" in texts(failed)
    assert "fit on no node" in mesh.plan.shortfall("m")
    assert brief(join(mesh, "n2", 30 * MB).directives)[0] == ("n2", "LOAD_SHARD", "0-30")


def test_a_restarted_node_is_believed_again() -> None:
    mesh = make_mesh("m")
    (directive,) = join(mesh, "n1", 30 * MB).directives
    mesh.report("n1", "i", directive.directive_id, FAILED, (), LATER, failure="out of memory")
    assert brief(join(mesh, "n1", 30 * MB, incarnation="i2").directives) == [("n1", "LOAD_SHARD", "0-30")]


def test_a_load_refused_because_it_is_there_says_nothing_about_memory() -> None:
    mesh = make_mesh("m")
    (directive,) = join(mesh, "n1", 30 * MB).directives
    effects = mesh.report("n1", "i", directive.directive_id, FAILED, [shard(0, 30)], LATER, failure="held already")
    assert "believed" not in texts(effects)
    assert mesh.topology.coverage("m").complete


def test_a_failed_drop_is_not_repeated() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    (drop, *_) = mesh.undeploy("m", LATER).directives
    failed = mesh.report(drop.node_id, "i", drop.directive_id, FAILED, [shard(0, 10)], LATER, failure="stuck")
    assert failed.directives == ()
    assert mesh.ledger.open(drop.node_id) == ()


def test_a_restart_fails_the_directives_of_the_older_process() -> None:
    mesh = make_mesh("m")
    join(mesh, "n1", 30 * MB)
    again = join(mesh, "n1", 30 * MB, incarnation="i2")
    assert next((d.state, d.failure) for d in mesh.ledger.all()) == (FAILED, "the node was restarted")
    assert brief(again.directives) == [("n1", "LOAD_SHARD", "0-30")]
    with pytest.raises(Unregistered):
        mesh.report("n1", "i", "d1", READY, (), LATER)
    with pytest.raises(Unregistered):
        mesh.heartbeat("n1", "i", (), LATER)


def test_registering_again_keeps_open_directives() -> None:
    mesh = make_mesh("m")
    join(mesh, "n1", 30 * MB)
    assert join(mesh, "n1", 30 * MB).directives == ()
    assert len(mesh.ledger.open("n1")) == 1


def test_layers_a_node_reports_are_taken_over() -> None:
    mesh = make_mesh("m")
    effects = join(mesh, "n1", 30 * MB, shards=[shard(0, 30)])
    assert effects.directives == ()
    assert mesh.topology.coverage("m").complete


def test_a_heartbeat_that_misses_layers_makes_a_new_plan() -> None:
    mesh = make_mesh("m")
    join(mesh, "n1", 30 * MB, shards=[shard(0, 30)])
    effects = mesh.heartbeat("n1", "i", [shard(0, 20)], LATER + 3)
    assert brief(effects.directives) == [("n1", "LOAD_SHARD", "20-30")]


def test_a_heartbeat_overtaken_by_a_report_is_not_believed() -> None:
    mesh = make_mesh("m")
    (directive,) = join(mesh, "n1", 30 * MB).directives
    finish(mesh, directive, now=LATER)
    assert mesh.heartbeat("n1", "i", (), LATER + 0.5) == Effects()
    assert mesh.topology.coverage("m").complete


def test_counters_of_heartbeats_wait_for_the_tick() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    shards = mesh.registry.nodes()["n1"].shards
    assert mesh.heartbeat("n1", "i", shards, LATER + 3, num_sessions=4, kv_tokens_free=9) == Effects()
    assert mesh.topology.nodes["n1"].num_sessions == 0
    assert mesh.tick(LATER + 4).topology_changed
    assert mesh.topology.nodes["n1"].num_sessions == 4
    assert mesh.topology.nodes["n1"].kv_tokens_free == 9


def test_impossible_heartbeats_and_reports_change_nothing() -> None:
    mesh = make_mesh("m")
    join(mesh, "n1", 30 * MB)
    before = mesh.topology
    with pytest.raises(InvalidRequest, match="which has 30"):
        mesh.heartbeat("n1", "i", [shard(0, 31)], LATER)
    with pytest.raises(InvalidRequest, match="not possible"):
        mesh.report("n1", "i", "d1", LOADING, (), LATER, bytes_total=2**63)
    with pytest.raises(InvalidRequest, match="no directive"):
        mesh.report("n1", "i", "d77", READY, (), LATER)
    with pytest.raises(InvalidRequest, match="PENDING to DROPPED"):
        mesh.report("n1", "i", "d1", DROPPED, (), LATER)
    assert not mesh.tick(LATER).topology_changed
    assert mesh.topology == before


def test_deploying_an_unknown_model_names_the_known_ones() -> None:
    mesh = make_mesh()
    join(mesh, "n1")
    with pytest.raises(UnknownModel, match=r"known models: m\. Start a node that has them: --model x=PATH"):
        mesh.deploy("x", 0, 0, LATER)


def test_deploying_again_changes_the_priority_but_not_a_promise() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    assert mesh.deployed("m").kv_tokens == manifest().context_length
    mesh.deploy("m", 0, 7, LATER)
    assert mesh.deployed("m").priority == 7
    with pytest.raises(InvalidRequest, match="undeploy it first"):
        mesh.deploy("m", 99, 7, LATER)
    assert mesh.deployed("m").kv_tokens == manifest().context_length
    waiting = make_mesh("m")
    join(waiting, "n1")
    waiting.deploy("m", 99, 0, LATER)
    assert waiting.deployed("m").kv_tokens == 128


def test_another_precision_of_kv_caches_is_another_deployment() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    with pytest.raises(InvalidRequest, match="KV caches at bfloat16, not int8: undeploy it first"):
        mesh.deploy("m", 0, 0, LATER, kv_precision=KvPrecision.INT8)
    with pytest.raises(InvalidRequest, match="undeploy it first"):
        mesh.preview(deploy=mesh.wished("m", 0, 0, kv_precision=KvPrecision.INT8))
    assert mesh.deployed("m").kv_precision is KvPrecision.BFLOAT16
    waiting = make_mesh()
    join(waiting, "n1", 100 * MB)
    effects = waiting.deploy("m", 128, 0, LATER, kv_precision=KvPrecision.INT8)
    assert [directive.kv_precision for directive in effects.directives] == [KvPrecision.INT8]
    assert any("KV cache room for 128 tokens at int8" in note.text for note in effects.notes)
    assert waiting.deployed("m").kv_precision is KvPrecision.INT8


def test_a_model_that_an_older_meshnet_described_must_be_described_anew() -> None:
    mesh = make_mesh()
    mesh.register(node("n1", 100 * MB), "i", [replace(manifest(), kv_scales_per_token=0)], LATER)
    with pytest.raises(InvalidRequest, match="of an older meshnet"):
        mesh.deploy("m", 0, 0, LATER, kv_precision=KvPrecision.INT8)
    mesh.deploy("m", 0, 0, LATER)


def test_an_undeployed_model_is_not_deployed_again_by_itself() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    mesh.undeploy("m", LATER)
    join(mesh, "n4")
    assert mesh.topology.models == {}


def test_another_revision_is_warned_about_and_gets_nothing() -> None:
    mesh = served_mesh("n1", "n2", "n3")
    effects = mesh.register(node("n4", 12 * MB), "i", [manifest(revision="r2")], LATER)
    assert effects.directives == ()
    assert any(n.level == logging.WARNING and "another revision" in n.text for n in effects.notes)


def test_after_a_restart_nothing_is_placed_before_the_others_are_back() -> None:
    mesh = make_mesh("m")
    assert join(mesh, "n1", 30 * MB, shards=[shard(0, 10)], now=1.0).directives == ()
    assert join(mesh, "n2", 30 * MB, shards=[shard(10, 30)], now=2.0).directives == ()
    assert mesh.topology.coverage("m").complete
    after = mesh.tick(8.0)
    assert brief(after.directives) == [("n1", "LOAD_SHARD", "10-30"), ("n2", "LOAD_SHARD", "0-10")]


def test_a_fresh_mesh_does_not_wait() -> None:
    mesh = make_mesh("m")
    assert brief(join(mesh, "n1", 30 * MB, now=0.5).directives) == [("n1", "LOAD_SHARD", "0-30")]


def test_ready_ranges_that_touch_are_one_shard() -> None:
    mesh = make_mesh("m")
    join(mesh, "n1", 30 * MB, shards=[shard(0, 10), shard(10, 30)])
    assert [s.layers for s in mesh.topology.nodes["n1"].shards] == [LayerRange(0, 30)]


def test_room_that_a_node_has_found_in_itself_is_used_at_once() -> None:
    mesh = make_mesh("m")
    # Room for 30 layers on the first; for 3 on the second, and for 3 more as soon as its steps take less.
    join(mesh, "n1", 31 * MB)
    lends = replace(node("n2", 6 * MB + KV_ROOM), workspace_bytes=WORKSPACE_BYTES + 3 * MB)
    mesh.register(lends, "i", [manifest()], LATER)
    finish_all(mesh)
    held = mesh.registry.nodes()["n2"].shards
    assert sum(len(shard.layers) for shard in held) == 3
    same = mesh.heartbeat("n2", "i", held, LATER, workspace_bytes=WORKSPACE_BYTES + 3 * MB)
    assert same.directives == ()
    effects = mesh.heartbeat("n2", "i", held, LATER, workspace_bytes=10 * MB)
    assert sum(len(directive.layers) for directive in effects.directives) == 3
    assert mesh.heartbeat("n2", "i", held, LATER, workspace_bytes=10 * MB).directives == ()
