"""What failures teach, plans of another time, deployments with limits, and what would be if."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet.directive import DirectiveState, FailureKind
from meshnet.errors import InvalidRequest, UnknownModel
from meshnet.topology import Speed
from services.tracker.effects import Effects
from services.tracker.mesh import Mesh
from tests.services.tracker.meshes import MB, manifest, node, shard
from tests.services.tracker.test_mesh import (
    KV_ROOM,
    LATER,
    all_open,
    brief,
    finish,
    finish_all,
    join,
    make_mesh,
    served_mesh,
    texts,
)

FAILED = DirectiveState.FAILED


def fail(mesh: Mesh, kind: FailureKind, newest: int = 0) -> Effects:
    """The first open directive fails."""
    directive = all_open(mesh)[0]
    return mesh.report(
        directive.node_id,
        "i",
        directive.directive_id,
        FAILED,
        mesh.registry.nodes()[directive.node_id].shards,
        LATER,
        failure="said why",
        failure_kind=kind,
        newest_plan_version=newest,
    )


def two_nodes() -> Mesh:
    """n1 is told to load everything; n2 has room for it too."""
    mesh = make_mesh()
    join(mesh, "n1", 31 * MB)
    join(mesh, "n2", 30 * MB)
    mesh.deploy("m", 0, 0, LATER, replicas=1)
    assert brief(all_open(mesh)) == [("n1", "LOAD_SHARD", "0-30")]
    return mesh


def test_bad_files_bar_the_model_from_the_node_and_say_nothing_of_its_memory() -> None:
    mesh = two_nodes()
    failed = fail(mesh, FailureKind.BAD_FILES)
    assert brief(failed.directives) == [("n2", "LOAD_SHARD", "0-30")]
    assert "node n1 is now believed: cannot load m" in texts(failed)
    assert mesh.room("n1")[2] is None
    again = fail(mesh, FailureKind.BAD_FILES)
    assert again.directives == ()
    assert "no node here has the files of this model and takes layers" in mesh.plan.shortfall("m")
    # A new process may have better files.
    back = join(mesh, "n1", 31 * MB, incarnation="j")
    assert brief(back.directives) == [("n1", "LOAD_SHARD", "0-30")]


def test_no_room_lowers_the_belief() -> None:
    mesh = two_nodes()
    failed = fail(mesh, FailureKind.NO_ROOM)
    assert brief(failed.directives) == [("n2", "LOAD_SHARD", "0-30")]
    believed = mesh.room("n1")[2]
    assert believed is not None
    assert believed < mesh.registry.nodes()["n1"].vram_bytes


def test_a_stale_plan_is_made_again_with_a_higher_number() -> None:
    mesh = two_nodes()
    again = fail(mesh, FailureKind.STALE_PLAN, newest=5000)
    assert brief(again.directives) == [("n1", "LOAD_SHARD", "0-30")]
    assert again.directives[0].plan_version > 5000
    assert mesh.room("n1")[2] is None


def test_the_next_plan_is_above_what_a_node_has_obeyed() -> None:
    mesh = make_mesh("m")
    lends = node("n1", 30 * MB + KV_ROOM)
    effects = mesh.register(lends, "i", [manifest()], LATER, newest_plan_version=77)
    assert [directive.plan_version for directive in effects.directives] == [78]


def test_a_node_that_does_not_answer_is_given_up_for_placement() -> None:
    mesh = two_nodes()
    late = LATER + mesh.settings.answer_seconds
    for now in (late - 1, late):
        for node_id in ("n1", "n2"):
            mesh.heartbeat(node_id, "i", (), now)
        effects = mesh.tick(now)
        assert bool(effects.directives) == (now == late)
    assert brief(effects.directives) == [("n2", "LOAD_SHARD", "0-30")]
    assert "nothing heard of it for 120 s" in texts(effects)
    (first, _) = mesh.ledger.all()
    assert (first.state, first.failure_kind) == (FAILED, FailureKind.NO_ANSWER)


def test_progress_is_an_answer() -> None:
    mesh = two_nodes()
    (load,) = all_open(mesh)
    late = LATER + mesh.settings.answer_seconds
    mesh.heartbeat("n2", "i", (), late - 1)
    mesh.report("n1", "i", load.directive_id, DirectiveState.LOADING, (), late - 1, bytes_done=1, bytes_total=9)
    assert mesh.tick(late).directives == ()


def test_a_deployment_has_limits() -> None:
    mesh = make_mesh()
    join(mesh, "n1", 60 * MB)
    with pytest.raises(UnknownModel):
        mesh.wished("other", 0, 0)
    with pytest.raises(InvalidRequest, match="made for 1024 tokens"):
        mesh.wished("m", 0, 0, max_context=4096)
    with pytest.raises(InvalidRequest, match="either"):
        mesh.wished("m", 100, 0, sessions=2)
    mesh.deploy("m", 0, 3, LATER, max_context=100, sessions=4, replicas=2)
    model = mesh.deployed("m")
    assert (model.kv_tokens, model.context_length, model.replicas, model.priority) == (512, 100, 2, 3)
    assert "at most 2 replicas" in texts(mesh.deploy("m", 400, 0, LATER, replicas=2))


def test_a_preview_changes_nothing() -> None:
    mesh = served_mesh("n1", "n2", "n3", "n4")
    before = mesh.ledger.all()
    without = mesh.preview(["n2"])
    assert [(draft.node_id, str(draft.layers)) for draft in without.drafts] == [("n1", "0-6"), ("n1", "12-20")]
    assert mesh.preview(["n2", "n3"]).shortfalls
    assert mesh.preview(deploy=mesh.wished("m", 1024, 5)).drafts == ()
    with pytest.raises(InvalidRequest, match="undeploy it first"):
        mesh.preview(deploy=mesh.wished("m", 2048, 0))
    assert mesh.ledger.all() == before
    assert mesh.tick(LATER) == Effects()


def test_rebalance_moves_for_a_gain_of_two() -> None:
    mesh = make_mesh()
    both = [manifest("a", 10), manifest("b", 10)]
    for index, held in enumerate("aaaabb"):
        one = node(f"n{index}", 10 * MB + KV_ROOM, "a", "b", shards=[shard(0, 10, held)])
        mesh.register(one, "i", both, 1.0)
    for model_id in "ab":
        mesh.deploy(model_id, 1024, 0, 1.0)
    with pytest.raises(InvalidRequest, match="try again soon"):
        mesh.rebalance(2.0)
    for index, held in enumerate("aaaabb"):
        mesh.heartbeat(f"n{index}", "i", [shard(0, 10, held)], 8.0)
    assert mesh.tick(9.0).directives == ()
    moved = mesh.rebalance(9.0)
    assert brief(moved.directives) == [("n0", "DROP_SHARD", "0-10"), ("n0", "LOAD_SHARD", "0-10")]
    finish_all(mesh, 9.0)
    assert mesh.rebalance(9.0).directives == ()


def test_a_node_with_other_files_is_told() -> None:
    mesh = make_mesh()
    join(mesh, "n1")
    other = manifest(revision="r2")
    mesh.register(node("n2", 12 * MB), "i", [other], LATER)
    (reason,) = mesh.refused_models([other]).values()
    assert "another revision than the mesh serves: r2 here, r1 in the mesh" in reason
    assert mesh.refused_models([manifest()]) == {}


def test_the_quick_node_gets_the_longer_stage() -> None:
    mesh = make_mesh()
    for node_id, rate in (("n1", 100.0), ("n2", 200.0)):
        speed = Speed("m", node("x", 1).quantization, 1000.0, rate)
        lends = replace(node(node_id, 25 * MB + KV_ROOM), speeds=(speed,))
        mesh.register(lends, "i", [manifest()], LATER)
    issued = mesh.deploy("m", 0, 0, LATER).directives
    assert brief(issued)[:2] == [("n1", "LOAD_SHARD", "0-10"), ("n2", "LOAD_SHARD", "10-30")]


def test_what_a_plan_leaves_is_ordered_at_the_next_tick() -> None:
    mesh = make_mesh()
    for index in range(100):
        join(mesh, f"n{index:02}", 30 * MB)
    first = mesh.deploy("m", 0, 0, LATER)
    assert len(first.directives) == 1 + mesh.settings.policy.max_redundant
    second = mesh.tick(LATER)
    assert len(first.directives) + len(second.directives) == 100
    for directive in (*first.directives, *second.directives):
        finish(mesh, directive)
    assert mesh.tick(LATER).directives == ()
