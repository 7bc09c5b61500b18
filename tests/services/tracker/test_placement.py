"""The planner on meshes small enough to see the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshnet.directive import Directive, DirectiveKind, DirectiveState
from meshnet.model import KvPrecision, LayerRange, Quantization
from meshnet.topology import Node, ShardState
from services.tracker.placement import WORKSPACE_BYTES, Known, Planner, plan
from tests.services.tracker.meshes import MB, deployed, drops, loads, node, obey, ready_replicas, settle, shard

MODEL = deployed()
THREE = (node("n1", 12 * MB), node("n2", 12 * MB), node("n3", 12 * MB))


def of(nodes: Sequence[Node], node_id: str) -> Node:
    return next(n for n in nodes if n.node_id == node_id)


def order(node_id: str, start: int, end: int, kind: DirectiveKind = DirectiveKind.LOAD_SHARD) -> Directive:
    return Directive("d1", node_id, kind, "m", LayerRange(start, end), 1, "test")


def test_three_equal_nodes_take_ten_layers_each() -> None:
    result = plan(THREE, [MODEL])
    assert loads(result) == [("n1", "0-10"), ("n2", "10-20"), ("n3", "20-30")]
    assert result.shortfalls == ()
    draft = result.drafts[0]
    assert (draft.revision, draft.kv_tokens, draft.quantization) == ("r1", 0, Quantization.BFLOAT16)
    assert draft.reason == "layers 0-10 of m have no node"


def test_two_layers_of_slack_are_no_redundancy() -> None:
    assert plan(obey(THREE, plan(THREE, [MODEL]).drafts), [MODEL]).drafts == ()


def test_uneven_layers_are_spread_evenly() -> None:
    result = plan(THREE, [deployed(num_layers=31)])
    assert loads(result) == [("n1", "0-11"), ("n2", "11-21"), ("n3", "21-31")]


def test_a_small_node_takes_what_fits_and_the_others_share_the_rest() -> None:
    nodes = (node("n1", 5 * MB), node("n2", 14 * MB), node("n3", 14 * MB))
    assert loads(plan(nodes, [MODEL])) == [("n1", "0-5"), ("n2", "5-18"), ("n3", "18-30")]


def test_fewest_nodes_are_used_and_the_others_make_it_redundant() -> None:
    nodes = (node("n1", 5 * MB), node("n2", 40 * MB), node("n3", 5 * MB))
    result = plan(nodes, [MODEL])
    assert loads(result) == [("n2", "0-30"), ("n1", "0-5"), ("n3", "5-10")]


def test_too_small_a_mesh_loads_nothing_and_says_what_is_missing() -> None:
    result = plan(THREE[:2], [MODEL])
    assert result.drafts == ()
    (missing,) = result.shortfalls
    assert (missing.model_id, str(missing.layers), missing.missing_bytes) == ("m", "24-30", 6 * MB)
    assert "layers 24-30 of m (6.0 MB at bfloat16" in missing.text
    assert "largest free: n1 with 0 B" in missing.text
    assert result.shortfall("m") == missing.text
    assert result.shortfall("other") == ""


def test_a_model_without_files_is_a_shortfall() -> None:
    result = plan([node("n1", 40 * MB, "other")], [MODEL])
    assert result.drafts == ()
    assert "no node here has the files" in result.shortfall("m")


def test_the_kv_cache_and_the_entry_weights_count() -> None:
    model = deployed(num_layers=2, kv_tokens=MB, entry_bytes=3 * MB)  # 2 MB a layer, 3 MB more for layer 0
    assert plan([node("n1", 7 * MB - 1)], [model]).drafts == ()
    assert loads(plan([node("n1", 7 * MB)], [model])) == [("n1", "0-2")]
    assert loads(plan([node("n1", 2 * MB), node("n2", 5 * MB)], [model])) == [("n2", "0-1"), ("n1", "1-2")]


def test_kv_caches_at_int8_take_half_and_their_scales() -> None:
    """In each of 4 layers 8 + 2 bytes a token, where bfloat16 takes 16."""
    bfloat16 = replace(deployed(num_layers=4), kv_tokens=MB // 2)
    bfloat16 = replace(bfloat16, manifest=replace(bfloat16.manifest, kv_bytes_per_token=16))
    int8 = replace(bfloat16, kv_precision=KvPrecision.INT8)
    assert plan([node("n1", 36 * MB - 1)], [bfloat16]).drafts == ()
    assert plan([node("n1", 24 * MB - 1)], [int8]).drafts == ()
    (draft,) = plan([node("n1", 24 * MB)], [int8]).drafts
    assert (draft.kv_tokens, draft.kv_precision) == (MB // 2, KvPrecision.INT8)


def test_the_tracker_nodes_node_is_entry_if_it_has_room() -> None:
    nodes = (node("a", 40 * MB), node("t", 4 * MB, tracker_node=True))
    assert loads(plan(nodes, [MODEL]))[:2] == [("t", "0-4"), ("a", "4-30")]
    poor = (node("a", 40 * MB), node("t", MB - 1, tracker_node=True))
    assert loads(plan(poor, [MODEL])) == [("a", "0-30")]
    without_files = (node("a", 40 * MB), node("t", 40 * MB, "other", tracker_node=True))
    assert loads(plan(without_files, [MODEL])) == [("a", "0-30")]


def test_models_are_covered_whole_in_priority_order() -> None:
    nodes = [node("n1", 35 * MB, "a", "b")]
    models = [deployed("a", 30), deployed("b", 30, priority=1)]
    result = plan(nodes, models)
    assert [(d.model_id, str(d.layers)) for d in result.drafts] == [("b", "0-30")]
    assert [s.model_id for s in result.shortfalls] == ["a"]
    equals = plan(nodes, [deployed("b", 30), deployed("a", 30)])
    assert [d.model_id for d in equals.drafts] == ["a"]


def test_a_fourth_node_becomes_redundancy_with_a_second_entry() -> None:
    settled = settle(THREE, [MODEL])
    result = plan([*settled, node("n4", 12 * MB)], [MODEL])
    assert loads(result) == [("n4", "0-12")]
    assert drops(result) == []
    assert "second replica of layers 0-12 of m" in result.drafts[0].reason


def test_further_redundancy_goes_to_the_layers_with_fewest_replicas() -> None:
    settled = settle([*THREE, node("n4", 12 * MB)], [MODEL])
    assert loads(plan([*settled, node("n5", 12 * MB)], [MODEL])) == [("n5", "12-24")]


def test_redundancy_waits_for_coverage() -> None:
    nodes = [node("n1", 31 * MB, "a"), node("n2", 31 * MB, "a"), node("n3", MB, "b")]
    assert loads(plan(nodes, [deployed("a"), deployed("b", 2)])) == [("n1", "0-30")]
    assert loads(plan(nodes, [deployed("a"), deployed("b", 1)])) == [("n1", "0-30"), ("n3", "0-1"), ("n2", "0-30")]


def test_a_lost_node_is_refilled_from_free_room() -> None:
    left = [node("n1", 12 * MB, shards=[shard(0, 10)]), node("n3", 22 * MB, shards=[shard(20, 30)])]
    result = plan(left, [MODEL])
    assert (loads(result), drops(result)) == ([("n3", "10-20")], [])


def test_a_lost_node_is_refilled_by_dropping_redundant_replicas() -> None:
    settled = settle([*THREE, node("n4", 12 * MB)], [MODEL])
    left = [n for n in settled if n.node_id != "n2"]
    result = plan(left, [MODEL])
    # n4 holds 0-12 too, and n1 has room for two layers more, so n1 has the least to drop: six, farthest from the gap.
    assert [(d.node_id, d.kind, str(d.layers)) for d in result.drafts] == [
        ("n1", DirectiveKind.DROP_SHARD, "0-6"),
        ("n1", DirectiveKind.LOAD_SHARD, "12-20"),
    ]
    assert "makes room for layers 12-20 of m" in result.drafts[0].reason
    after = obey(left, result.drafts)
    assert len(ready_replicas(after)) == 30
    assert plan(after, [MODEL]).drafts == ()


def test_the_tracker_nodes_node_keeps_its_first_layers_when_another_can_give_way() -> None:
    settled = settle([replace(THREE[0], tracker_node=True), *THREE[1:], node("n4", 12 * MB)], [MODEL])
    result = plan([n for n in settled if n.node_id != "n2"], [MODEL])
    assert (drops(result), loads(result)) == ([("n4", "0-8")], [("n4", "12-20")])


def test_room_is_made_on_several_nodes_if_one_is_not_enough() -> None:
    left = [
        node("n1", 10 * MB, shards=[shard(0, 10)]),
        node("n2", 10 * MB, shards=[shard(0, 10)]),
        node("n3", 10 * MB, shards=[shard(20, 30)]),
        node("n4", 5 * MB, shards=[shard(25, 30)]),
    ]
    result = plan(left, [MODEL])
    after = obey(left, result.drafts)
    assert set(ready_replicas(after)) == set(range(30))
    assert plan(after, [MODEL]).drafts == ()


def test_redundancy_of_one_model_makes_room_for_another() -> None:
    nodes = settle([node("n1", 30 * MB, "a", "b"), node("n2", 30 * MB, "a", "b")], [deployed("a", 30)])
    assert set(ready_replicas(nodes, "a").values()) == {2}
    result = plan(nodes, [deployed("a", 30), deployed("b", 10)])
    assert drops(result) == [("n1", "20-30")]
    assert loads(result) == [("n1", "0-10")]


def test_a_gap_that_fits_nowhere_leaves_the_rest_alone() -> None:
    settled = settle(THREE, [MODEL])
    result = plan([of(settled, "n1"), of(settled, "n3")], [MODEL])
    assert result.drafts == ()
    assert "layers 14-20 of m" in result.shortfall("m")


def test_gaps_are_filled_each_on_its_own() -> None:
    nodes = [node("n1", 12 * MB, shards=[shard(0, 8), shard(10, 12)]), node("n2", MB, shards=[])]
    result = plan(nodes, [deployed(num_layers=14)])
    assert loads(result) == [("n1", "8-10")]
    assert [str(s.layers) for s in result.shortfalls] == ["13-14"]


def test_a_gap_goes_to_the_emptier_node_before_it_doubles_a_stage() -> None:
    nodes = [
        node("n1", 30 * MB, shards=[shard(0, 10)]),
        node("n2", 30 * MB),
        node("n3", 10 * MB, shards=[shard(20, 30)]),
    ]
    assert loads(plan(nodes, [MODEL]))[0] == ("n2", "10-20")


def test_a_small_gap_extends_a_neighbour() -> None:
    nodes = [
        node("n1", 30 * MB, shards=[shard(0, 14)]),
        node("n2", 30 * MB),
        node("n3", 14 * MB, shards=[shard(16, 30)]),
    ]
    assert loads(plan(nodes, [MODEL]))[0] == ("n1", "14-16")


def test_layers_in_flight_are_held_and_take_room() -> None:
    loading = node("n1", 12 * MB, shards=[shard(0, 10, state=ShardState.LOADING)])
    nodes = [loading, node("n2", 12 * MB), node("n3", 12 * MB)]
    result = plan(nodes, [MODEL], [replace(order("n2", 10, 20), state=DirectiveState.ACCEPTED)])
    assert loads(result) == [("n3", "20-30")]


def test_an_open_drop_frees_its_room_for_what_comes_after() -> None:
    nodes = [node("n1", 30 * MB, shards=[shard(0, 30)]), node("n2", 30 * MB, shards=[shard(0, 30)])]
    directive = order("n1", 0, 30, DirectiveKind.DROP_SHARD)
    assert loads(plan(nodes, [MODEL], [directive])) == [("n1", "0-30")]


def test_undeployed_models_are_dropped_once() -> None:
    nodes = [node("n1", 30 * MB, shards=[shard(0, 10), shard(20, 30)])]
    result = plan(nodes, [])
    assert drops(result) == [("n1", "0-10"), ("n1", "20-30")]
    assert result.drafts[0].reason == "m is not deployed"
    opened = [order("n1", 0, 10, DirectiveKind.DROP_SHARD), order("n1", 20, 30, DirectiveKind.DROP_SHARD)]
    assert plan(nodes, [], opened).drafts == ()
    assert plan(nodes, [], stuck={("n1", "m")}).drafts == ()


def test_another_revision_is_dropped_and_counts_for_nothing() -> None:
    stale = node("n1", 60 * MB, "other", shards=[shard(0, 30)])
    result = plan([stale, node("n2", 30 * MB)], [MODEL])
    assert drops(result) == [("n1", "0-30")]
    assert loads(result) == [("n2", "0-30")]


def test_stubs_are_used_only_without_real_nodes() -> None:
    stubs = [node("s1", 40 * MB, stub=True)]
    assert loads(plan(stubs, [MODEL])) == [("s1", "0-30")]
    result = plan([*stubs, node("n1", 10 * MB)], [MODEL])
    assert result.drafts == ()
    assert "fit on no node" in result.shortfall("m")


def test_stub_shards_go_when_real_nodes_serve_everything() -> None:
    stub = node("s1", 40 * MB, stub=True, shards=[shard(0, 30)])
    joined = [stub, node("n1", 40 * MB)]
    result = plan(joined, [MODEL])
    assert (loads(result), drops(result)) == ([("n1", "0-30")], [])
    assert drops(plan(obey(joined, result.drafts), [MODEL])) == [("s1", "0-30")]


def test_a_refused_load_is_not_tried_again_as_it_was() -> None:
    failed = order("n1", 0, 30)
    big = node("n1", 30 * MB)
    planner = Planner()
    planner.set_models([MODEL])
    planner.set_node(Known(big, (failed,)))
    believed = planner.believed_bytes(failed)
    assert believed == 15 * MB + WORKSPACE_BYTES
    assert plan([big], [MODEL], refused={"n1": believed}).drafts == ()
    result = plan([big, node("n2", 15 * MB)], [MODEL], refused={"n1": believed})
    assert loads(result) == [("n1", "0-15"), ("n2", "15-30")]


def test_a_node_takes_weights_at_its_own_quantization() -> None:
    nodes = [node("n1", 30 * MB, quantization=Quantization.NF4)]
    assert plan(nodes, [MODEL]).drafts[0].quantization is Quantization.NF4


def test_fifty_nodes_are_planned() -> None:
    nodes = [node(f"n{i:02}", 3 * MB) for i in range(50)]
    result = plan(nodes, [deployed(num_layers=80)])
    assert result.shortfalls == ()
    counts = ready_replicas(obey(nodes, result.drafts))
    assert set(counts) == set(range(80))
