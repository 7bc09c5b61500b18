"""The planner as it is told of one change after the other: it must say what a new one would say of the same mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.directive import Directive
from meshnet.topology import DeployedModel, Node
from services.tracker.placement import Known, Plan, Planner, plan
from tests.services.tracker.meshes import MB, deployed, drops, loads, node, obey, ready_replicas, settle, shard
from tests.services.tracker.test_placement_properties import empty_nodes, meshes, models


def told(planner: Planner, nodes: Mapping[str, Node], before: Mapping[str, Node]) -> None:
    for node_id in before.keys() - nodes.keys():
        planner.remove_node(node_id)
    for node_id, one in nodes.items():
        if before.get(node_id) != one:
            planner.set_node(Known(one))


def by_id(nodes: Sequence[Node]) -> dict[str, Node]:
    return {n.node_id: n for n in nodes}


@settings(max_examples=60, deadline=None)
@given(empty_nodes(), models("a", uniform=True), models("b", uniform=False), st.data())
def test_a_told_planner_plans_as_a_new_one(
    nodes: list[Node], first: DeployedModel, second: DeployedModel, data: st.DataObject
) -> None:
    planner = Planner()
    known: dict[str, Node] = {}
    present: dict[str, Node] = {}
    for _ in range(8):
        deployed_now = data.draw(st.sampled_from([[first], [first, second], [second]]))
        changed = data.draw(st.sampled_from(nodes))
        if changed.node_id not in present:
            present[changed.node_id] = changed
        elif data.draw(st.booleans()):
            del present[changed.node_id]
        else:
            old = present[changed.node_id]
            present[changed.node_id] = replace(old, alive=data.draw(st.booleans()), draining=data.draw(st.booleans()))
        told(planner, present, known)
        known = dict(present)
        planner.set_models(deployed_now)
        result = planner.plan()
        assert result == plan(present.values(), deployed_now)
        assert planner.plan() == result, "asked twice, it answers the same"
        if data.draw(st.booleans()):
            present = by_id(obey(present.values(), result.drafts))


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_open_directives_take_the_place_of_what_was_planned(mesh: tuple[list[Node], list[DeployedModel]]) -> None:
    nodes, deployed_now = mesh
    planner = Planner()
    planner.set_models(deployed_now)
    for one in nodes:
        planner.set_node(Known(one))
    drafts = planner.plan().drafts
    for one in nodes:
        ordered = tuple(
            Directive(str(i), d.node_id, d.kind, d.model_id, d.layers, 1, d.reason, d.quantization, d.revision)
            for i, d in enumerate(drafts)
            if d.node_id == one.node_id
        )
        planner.set_node(Known(one, ordered))
    assert planner.plan().drafts == ()


def test_the_order_in_which_nodes_are_told_does_not_matter() -> None:
    nodes = [node(f"n{i}", (5 + i) * MB) for i in range(9)]
    assert plan(nodes, [deployed()]) == plan(reversed(nodes), [deployed()])


def test_what_is_supposed_is_forgotten() -> None:
    settled = settle([node(f"n{i}", 12 * MB) for i in range(1, 5)], [deployed()])
    planner = Planner()
    planner.set_models([deployed()])
    for one in settled:
        planner.set_node(Known(one))
    with planner.supposing(without=["n2"]):
        assert [draft.node_id for draft in planner.plan().drafts] == ["n1", "n1"]
    with planner.supposing(models=[]):
        assert len(drops(planner.plan())) == 4
    assert planner.plan() == Plan()


def test_in_a_large_mesh_a_lost_node_is_refilled_by_one_other() -> None:
    empty = [node(f"n{i:03}", 12 * MB, "a", "b") for i in range(200)]
    nodes = settle(empty, [deployed("a"), deployed("b")], rounds=10)
    planner = Planner()
    planner.set_models([deployed("a"), deployed("b")])
    for one in nodes:
        planner.set_node(Known(one))
    assert planner.plan() == Plan()
    alone = replace(nodes[0], shards=())
    planner.set_node(Known(alone))
    assert {draft.node_id for draft in planner.plan().drafts} == {alone.node_id}


def test_what_has_many_replicas_gives_way_to_what_has_one() -> None:
    nodes = [
        node("n1", 10 * MB, "a", "b", shards=[shard(0, 10, "a")]),
        node("n2", 10 * MB, "a", "b", shards=[shard(0, 10, "a")]),
        node("n3", 10 * MB, "a", "b", shards=[shard(0, 10, "a")]),
        node("n4", 10 * MB, "a", "b", shards=[shard(0, 10, "b")]),
    ]
    both = [deployed("a", 10), deployed("b", 10)]
    result = plan(nodes, both)
    assert (drops(result), loads(result)) == ([("n1", "0-10")], [("n1", "0-10")])
    assert "which have 1 replica" in result.drafts[0].reason
    settled = settle(nodes, both)
    assert set(ready_replicas(settled, "a").values()) == set(ready_replicas(settled, "b").values()) == {2}


def test_nothing_gives_way_for_a_small_gain() -> None:
    nodes = [node(f"n{i}", 10 * MB, "a", "b", shards=[shard(0, 10, "a")]) for i in range(2)]
    nodes.append(node("n9", 10 * MB, "a", "b", shards=[shard(0, 10, "b")]))
    assert plan(nodes, [deployed("a", 10), deployed("b", 10)]) == Plan()


def test_a_model_has_no_more_replicas_than_it_is_deployed_with() -> None:
    nodes = [node(f"n{i}", 30 * MB) for i in range(4)]
    two = replace(deployed(), replicas=2)
    settled = settle(nodes, [two])
    assert set(ready_replicas(settled).values()) == {2}
    fewer = plan(settled, [replace(deployed(), replicas=1)])
    assert drops(fewer) == [("n0", "0-30")]
    assert set(ready_replicas(settle(settle(nodes, [deployed()]), [two])).values()) == {2}


def test_redundancy_goes_to_another_site_first() -> None:
    nodes = [
        replace(node("a1", 10 * MB, shards=[shard(0, 10)]), site="a"),
        replace(node("b1", 10 * MB, shards=[shard(10, 20)]), site="b"),
        replace(node("b2", 10 * MB), site="b"),
    ]
    assert loads(plan(nodes, [deployed(num_layers=20)])) == [("b2", "0-10")]
    nodes[2] = replace(nodes[2], site="a")
    assert loads(plan(nodes, [deployed(num_layers=20)])) == [("b2", "10-20")]
