"""The mesh with nodes that fetch weights: sources come and go, trackers forget, revisions do not mix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.errors import UnknownModel
from meshnet.topology import Shard, ShardState
from services.tracker.effects import Effects
from services.tracker.mesh import Mesh
from tests.services.tracker.meshes import MB, fetcher, manifest, node, shard
from tests.services.tracker.test_mesh import (
    DROPPED,
    KV_ROOM,
    LATER,
    READY,
    all_open,
    brief,
    finish,
    finish_all,
    join,
    make_mesh,
    texts,
)

ROOM = 40 * MB


def join_fetcher(
    mesh: Mesh, node_id: str, room: int = ROOM, shards: Sequence[Shard] = (), incarnation: str = "i", now: float = LATER
) -> Effects:
    return mesh.register(fetcher(node_id, room + KV_ROOM, shards=shards), incarnation, [], now)


def fail(mesh: Mesh, directive: Directive, kind: FailureKind) -> Effects:
    shards = mesh.registry.nodes()[directive.node_id].shards
    return mesh.report(
        directive.node_id,
        "i",
        directive.directive_id,
        DirectiveState.FAILED,
        shards,
        LATER,
        failure="nobody answers",
        failure_kind=kind,
    )


def fetched_mesh() -> Mesh:
    """A source too small for any layer, and two nodes that have fetched all of them."""
    mesh = make_mesh("m")
    joined = join_fetcher(mesh, "f1")
    assert "files of no models, fetches" in texts(joined)
    join_fetcher(mesh, "f2")
    join(mesh, "s", room=-KV_ROOM)
    finish_all(mesh)
    assert mesh.topology.coverage("m").spans[0].ready == ("f1", "f2")
    return mesh


def test_what_was_fetched_is_served_without_its_source() -> None:
    mesh = fetched_mesh()
    before = {i: mesh.topology.nodes[i] for i in ("f1", "f2")}
    left = mesh.leave("s", "i", LATER)
    assert left.directives == ()
    assert {i: mesh.topology.nodes[i] for i in ("f1", "f2")} == before
    assert [s.state for s in before["f1"].shards] == [ShardState.READY]
    assert {s.revision for s in before["f1"].shards} == {""}, "the topology's shards are all of the served revision"
    assert mesh.registry.holders("m") == ()


def test_a_source_of_another_revision_is_none() -> None:
    mesh = fetched_mesh()
    mesh.leave("s", "i", LATER)
    other = mesh.register(node("s2", ROOM), "i", [manifest(revision="r2")], LATER)
    assert "gets no layers of it" in texts(other)
    join_fetcher(mesh, "f3")
    assert all_open(mesh) == []
    assert mesh.topology.nodes["s2"].available_models == frozenset()
    assert brief(join(mesh, "s3", room=-KV_ROOM).directives) == [("f3", "LOAD_SHARD", "0-30")]


def test_a_fetching_node_with_another_revision_takes_the_mesh_s() -> None:
    mesh = make_mesh("m")
    join(mesh, "s", room=-KV_ROOM)
    description = fetcher("f", ROOM, "m", shards=[shard(0, 30, revision="r2")])
    back = mesh.register(description, "i", [manifest(revision="r2")], LATER)
    assert "fetches the mesh's" in texts(back)
    assert mesh.refused_models([manifest(revision="r2")], fetches=True) == {}
    assert brief(back.directives) == [("f", "DROP_SHARD", "0-30"), ("f", "LOAD_SHARD", "0-30")]
    assert [s.state for s in mesh.topology.nodes["f"].shards] == [ShardState.LOADING]
    finish_all(mesh)
    assert mesh.registry.nodes()["f"].shards == (shard(0, 30, revision="r1"),)
    assert mesh.topology.coverage("m").complete


def test_what_an_unknown_model_s_layers_take_is_freed() -> None:
    """A tracker that was restarted without its state."""
    mesh = make_mesh()
    back = join_fetcher(mesh, "f", shards=[shard(0, 40, revision="r1")])
    assert brief(back.directives) == [("f", "DROP_SHARD", "0-40")]
    assert mesh.topology.nodes["f"].shards == ()
    finish_all(mesh)
    assert mesh.registry.nodes()["f"].shards == ()


def test_after_a_restart_the_source_may_come_back_last() -> None:
    """The pause for nodes that bring layers holds for fetched ones too."""
    mesh = make_mesh("m")
    held = [shard(0, 30, revision="r1")]
    assert join_fetcher(mesh, "f", shards=held, now=1.0).directives == ()
    join(mesh, "s", room=-KV_ROOM, now=2.0)
    assert mesh.topology.coverage("m").complete
    mesh.heartbeat("f", "i", held, 500.0)
    assert mesh.tick(500.0).directives == ()


def test_without_a_source_nothing_is_deployed() -> None:
    mesh = make_mesh("m")
    join_fetcher(mesh, "f")
    with pytest.raises(UnknownModel, match="no node has the files of model 'm'"):
        mesh.deploy("m", 0, 0, LATER)


@pytest.mark.parametrize("again", ["a source", "itself", "a new deployment"])
def test_a_node_that_found_no_source_is_asked_again_when_something_changed(again: str) -> None:
    mesh = make_mesh("m")
    join(mesh, "s", room=-KV_ROOM)
    (directive,) = join_fetcher(mesh, "f").directives
    failed = fail(mesh, directive, FailureKind.NO_SOURCE)
    assert "cannot fetch m, until a node that has its files registers" in texts(failed)
    assert failed.directives == ()
    assert "largest free: s" in mesh.plan.shortfall("m")
    mesh.drain("s", LATER)
    assert "no node here that takes layers has the files of this model or can fetch its weights" in mesh.plan.shortfall(
        "m"
    )
    mesh.drain("s", LATER, cancel=True)
    for when in range(1, 4):
        mesh.heartbeat("s", "i", (), LATER + when)
        mesh.heartbeat("f", "i", (), LATER + when)
        assert mesh.tick(LATER + when).directives == ()
    # Neither of these tells anything of this model's files.
    mesh.register(node("o", MB), "i", [manifest(revision="r2")], LATER)
    mesh.register(replace(node("z", MB), stub=True), "i", [manifest()], LATER)
    assert all_open(mesh) == []
    if again == "a source":
        effects = join(mesh, "s2", room=-KV_ROOM)
    elif again == "itself":
        effects = join_fetcher(mesh, "f")
    else:
        mesh.undeploy("m", LATER)
        effects = mesh.deploy("m", 0, 0, LATER)
    assert brief(effects.directives) == [("f", "LOAD_SHARD", "0-30")]
    assert mesh.room("f")[2] is None, "it says nothing of memory"


def test_a_source_that_came_while_a_node_was_looking_is_not_missed() -> None:
    mesh = make_mesh("m")
    join(mesh, "s", room=-KV_ROOM)
    (directive,) = join_fetcher(mesh, "f").directives
    mesh.leave("s", "i", LATER)
    join(mesh, "s", room=-KV_ROOM)
    again = fail(mesh, directive, FailureKind.NO_SOURCE)
    assert brief(again.directives) == [("f", "LOAD_SHARD", "0-30")]
    assert fail(mesh, again.directives[0], FailureKind.NO_SOURCE).directives == ()


class SourcesComeAndGo(RuleBasedStateMachine):
    """Nodes join, leave and obey in any order; weights of two revisions are about."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = make_mesh("m")
        self.now = LATER

    def here(self, node_id: str) -> bool:
        return node_id in self.mesh.registry.nodes()

    @rule(node_id=st.sampled_from(["s1", "s2"]), revision=st.sampled_from(["r1", "r1", "r2"]))
    def source_toggles(self, node_id: str, revision: str) -> None:
        if self.here(node_id):
            self.mesh.leave(node_id, "i", self.now)
        else:
            self.mesh.register(node(node_id, 0), "i", [manifest(num_layers=4, revision=revision)], self.now)

    @rule(node_id=st.sampled_from(["f1", "f2"]), held=st.sampled_from([None, "r1", "r2"]))
    def fetcher_joins(self, node_id: str, held: str | None) -> None:
        if not self.here(node_id):
            shards = [shard(0, 2, revision=held)] if held else []
            self.mesh.register(fetcher(node_id, 5 * MB, shards=shards), "i", [], self.now)

    @precondition(lambda self: bool(all_open(self.mesh)))
    @rule()
    def one_is_obeyed(self) -> None:
        directive = all_open(self.mesh)[0]
        finish(self.mesh, directive, READY if directive.kind is DirectiveKind.LOAD_SHARD else DROPPED, self.now)

    @precondition(lambda self: bool(all_open(self.mesh)))
    @rule()
    def one_finds_no_source(self) -> None:
        directive = all_open(self.mesh)[0]
        if directive.kind is DirectiveKind.LOAD_SHARD:
            fail(self.mesh, directive, FailureKind.NO_SOURCE)

    @rule()
    def model_is_deployed_anew(self) -> None:
        if "m" in self.mesh.topology.models:
            self.mesh.undeploy("m", self.now)
            finish_all(self.mesh)
        if "m" in self.mesh.registry.manifests:
            self.mesh.deploy("m", 0, 0, self.now)

    @invariant()
    def nothing_mixes(self) -> None:
        served = self.mesh.registry.manifests.get("m")
        for node_id, one in self.mesh.registry.nodes().items():
            shown = self.mesh.topology.nodes[node_id].layers("m")
            right = {
                layer
                for s in one.shards
                if served is not None and s.revision == served.revision
                for layer in s.layers.layers
            }
            assert shown <= right, "only the served revision is shown"
            gone = {
                layer
                for d in self.mesh.ledger.open(node_id)
                if d.kind is DirectiveKind.DROP_SHARD
                for layer in d.layers.layers
            }
            assert right - gone <= shown, "what is held and not dropped stays served"
            wrong = {i for s in one.shards for i in s.layers.layers} - right
            assert wrong <= gone, "another revision is dropped"

    @invariant()
    def who_loads_has_a_source(self) -> None:
        served = self.mesh.registry.manifests.get("m")
        assert all(served and d.revision == served.revision for d in all_open(self.mesh) if d.revision)


SourcesComeAndGo.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSourcesComeAndGo = SourcesComeAndGo.TestCase
