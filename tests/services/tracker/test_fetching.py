"""Nodes that fetch weights from nodes that have the files: who takes what, and what stays when the source goes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.topology import Node
from services.tracker.placement import Known, Plan, Planner, plan
from tests.services.tracker.meshes import MB, deployed, drops, fetcher, loads, node, obey, ready_replicas, settle, shard
from tests.services.tracker.test_planner import by_id, told

MODEL = deployed(num_layers=10)


def held(*nodes: Node) -> dict[str, list[str]]:
    return {n.node_id: [str(s.layers) for s in n.shards] for n in nodes}


def test_a_node_without_files_takes_layers_while_a_node_has_them() -> None:
    source, other = node("s", 5 * MB), fetcher("f", 5 * MB)
    assert plan([other], [MODEL]).drafts == ()
    result = plan([source, other], [MODEL])
    assert sorted(loads(result)) == [("f", "0-5"), ("s", "5-10")]
    assert {draft.revision for draft in result.drafts} == {"r1"}
    plain = replace(other, fetches=False)
    assert plan([source, plain], [MODEL]).shortfall("m")


@pytest.mark.parametrize(
    "source",
    [
        replace(node("s", 10 * MB), stub=True),
        replace(node("s", 10 * MB), available_models=frozenset({"other"})),
    ],
)
def test_what_is_no_source(source: Node) -> None:
    result = plan([source, fetcher("f", 10 * MB)], [MODEL])
    assert all(draft.node_id != "f" for draft in result.drafts)


def test_stubs_stand_in_while_nobody_real_could_hold_the_model() -> None:
    stub = replace(node("s", 10 * MB), stub=True)
    assert loads(plan([stub, fetcher("f", 10 * MB)], [MODEL])) == [("s", "0-10")]


@pytest.mark.parametrize("change", [{"draining": True}, {"alive": False}])
def test_a_source_that_is_on_its_way_out_is_one(change: dict[str, bool]) -> None:
    source = replace(node("s", 10 * MB, shards=[shard(0, 10)]), **change)  # type: ignore[arg-type]
    result = plan([source, fetcher("f", 10 * MB)], [MODEL])
    assert loads(result) == [("f", "0-10")]


def test_who_has_the_files_comes_first_where_all_else_is_equal() -> None:
    nodes = [fetcher("a", 10 * MB), node("z", 10 * MB), fetcher("b", 10 * MB)]
    assert loads(plan(nodes, [replace(MODEL, replicas=1)])) == [("z", "0-10")]
    two = [*nodes, node("y", 10 * MB)]
    assert sorted(n for n, _ in loads(plan(two, [replace(deployed(num_layers=20), replicas=1)]))) == ["y", "z"]


def test_replicas_reach_nodes_without_files() -> None:
    nodes = settle([node("s", 10 * MB), fetcher("f1", 10 * MB), fetcher("f2", 10 * MB)], [MODEL])
    assert set(ready_replicas(nodes).values()) == {3}
    assert {s.revision for n in nodes for s in n.shards} == {"r1"}


def test_what_is_held_stays_when_the_source_goes() -> None:
    nodes = settle([node("s", 4 * MB), fetcher("f1", 10 * MB), fetcher("f2", 10 * MB)], [MODEL])
    left = [n for n in nodes if n.node_id != "s"]
    assert plan(left, [MODEL]) == Plan()
    assert plan(left, [replace(MODEL, replicas=1)]).drafts != ()
    # No more can be fetched: a replica that is lost is not replaced.
    alone = [left[0], replace(left[1], shards=())]
    assert plan(alone, [MODEL]) == Plan()
    assert loads(plan([*alone, node("s", 0)], [MODEL])) == [("f2", "0-10")]


def test_no_stub_comes_beside_what_was_fetched() -> None:
    stub = replace(node("stub", 10 * MB), stub=True)
    result = plan([fetcher("f", 10 * MB, shards=[shard(0, 5, revision="r1")]), stub], [MODEL])
    assert result.drafts == ()
    assert "so that nobody can fetch its weights" in result.shortfall("m")


def test_another_revision_is_dropped_and_the_right_one_loaded() -> None:
    old = fetcher("f", 10 * MB, shards=[shard(0, 10, revision="r0")])
    result = plan([old, node("s", 0)], [MODEL])
    assert (drops(result), loads(result)) == ([("f", "0-10")], [("f", "0-10")])
    assert "another revision" in result.drafts[0].reason
    (after, _) = obey([old, node("s", 0)], result.drafts)
    assert after.shards == (shard(0, 10, revision="r1"),)


def test_of_two_revisions_on_a_node_only_the_served_one_counts() -> None:
    both = fetcher("f", 20 * MB, shards=[shard(0, 5, revision="r0"), shard(5, 10, revision="r1")])
    result = plan([both], [MODEL])
    assert drops(result) == [("f", "0-5")]
    assert "layers 0-5" in result.shortfall("m")


def test_nothing_is_loaded_beside_another_revision_that_cannot_be_dropped() -> None:
    old = fetcher("f", 20 * MB, shards=[shard(0, 5, revision="r0")])
    result = plan([old, node("s", 0)], [MODEL], stuck={("f", "m")})
    assert result.drafts == ()


def test_a_node_with_files_of_another_revision_may_fetch() -> None:
    """The registry has taken the model off what it has at hand."""
    both = fetcher("f", 10 * MB, shards=[shard(0, 5)])
    result = plan([both, node("s", 0)], [MODEL])
    assert (drops(result), loads(result)) == ([("f", "0-5")], [("f", "0-10")])


def test_a_source_wakes_those_who_had_enough() -> None:
    planner = Planner()
    planner.set_models([MODEL])
    for one in (fetcher("f1", 10 * MB, shards=[shard(0, 10, revision="r1")]), fetcher("f2", 10 * MB)):
        planner.set_node(Known(one))
    assert planner.plan() == Plan()
    planner.set_node(Known(node("s", 0)))
    assert loads(planner.plan()) == [("f2", "0-10")]
    planner.remove_node("s")
    assert planner.plan() == Plan()


@st.composite
def cast(draw: st.DrawFn) -> list[Node]:
    """Sources with little room, fetching nodes with more, and a stub."""
    sources = [node(f"s{i}", draw(st.integers(0, 3)) * MB, draw(st.sampled_from("ab"))) for i in range(3)]
    fetching = [fetcher(f"f{i}", draw(st.integers(2, 12)) * MB, *draw(st.sampled_from(["", "a"]))) for i in range(3)]
    return [*sources, *fetching, replace(node("z", 10 * MB, "a", "b"), stub=True)]


@settings(max_examples=80, deadline=None)
@given(cast(), st.sampled_from([None, 1, 2]), st.data())
def test_a_told_planner_follows_sources_that_come_and_go(
    nodes: list[Node], replicas: int | None, data: st.DataObject
) -> None:
    models = [replace(deployed("a", 4), replicas=replicas), deployed("b", 3)]
    planner = Planner()
    planner.set_models(models)
    known: dict[str, Node] = {}
    present = by_id(nodes)
    for _ in range(10):
        told(planner, present, known)
        known = dict(present)
        result = planner.plan()
        assert result == plan(present.values(), models)
        assert planner.plan() == result, "asked twice, it answers the same"
        if data.draw(st.booleans()):
            present = by_id(obey(present.values(), result.drafts))
            continue
        changed = data.draw(st.sampled_from(nodes))
        if changed.node_id not in present:
            present[changed.node_id] = changed
        elif data.draw(st.booleans()):
            del present[changed.node_id]
        else:
            # Its files are of another revision from now on, or of this one again.
            old = present[changed.node_id]
            files = data.draw(st.sampled_from([frozenset[str](), changed.available_models]))
            present[changed.node_id] = replace(old, available_models=files)
