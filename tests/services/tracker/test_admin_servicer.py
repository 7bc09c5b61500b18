"""What the Admin service tells of nodes and plans."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from meshnet import convert, convert_admin
from meshnet.admin import NodeDescription, PlanPreview
from meshnet.directive import DirectiveKind, DirectiveState, FailureKind
from meshnet.model import LayerRange
from meshnet.v1 import admin_pb2
from services.tracker.admin_servicer import AdminServicer
from services.tracker.config import Config
from services.tracker.effects import Effects, Note
from services.tracker.placement import WORKSPACE_BYTES
from services.tracker.store import MemoryStore
from services.tracker.tracker import Tracker
from tests.services.tracker.meshes import MB, deployed, manifest, node, shard

LATER = 1000.0
KV_TOKENS = 128
LAYERS = 10


@pytest.fixture
async def tracker() -> Tracker:
    return Tracker(Config("127.0.0.1", 0, lease_seconds=1000, suspect_seconds=900), MemoryStore())


def join(tracker: Tracker, node_id: str, held: str = "", room: int = LAYERS * MB) -> None:
    """Gives the node room for `room` bytes and the files of models a and b; it holds all of one of them, or nothing."""
    shards = [shard(0, LAYERS, held)] if held else []
    one = node(node_id, room + LAYERS * KV_TOKENS, "a", "b", shards=shards)
    tracker.apply(tracker.mesh.register(one, "i", [manifest("a", LAYERS), manifest("b", LAYERS)], tracker.now()))


def deploy(tracker: Tracker, model_id: str) -> None:
    tracker.apply(tracker.mesh.deploy(model_id, KV_TOKENS, 0, tracker.now()))


async def planned(tracker: Tracker, *without: str, rebalance: bool = False, deploy: str = "") -> PlanPreview:
    wish = admin_pb2.DeployModelRequest(model_id=deploy, kv_tokens=KV_TOKENS) if deploy else None
    request = admin_pb2.GetPlanRequest(without_node_ids=without, rebalance=rebalance, deploy=wish)
    return convert_admin.preview_from_proto(await AdminServicer(tracker).GetPlan(request, None))


async def described(tracker: Tracker, node_id: str) -> NodeDescription:
    answer = await AdminServicer(tracker).DescribeNode(admin_pb2.DescribeNodeRequest(node_id=node_id), None)
    return convert_admin.description_from_proto(answer)


async def test_a_plan_without_a_node_says_who_loads_its_layers(tracker: Tracker) -> None:
    for index, held in enumerate("aab"):
        join(tracker, f"n{index}", held)
    for model_id in "ab":
        deploy(tracker, model_id)
    topology = tracker.mesh.topology
    preview = await planned(tracker, "n2")
    assert [(d.node_id, d.kind, d.model_id) for d in preview.directives] == [
        ("n0", DirectiveKind.DROP_SHARD, "a"),
        ("n0", DirectiveKind.LOAD_SHARD, "b"),
    ]
    assert [d.bytes_total for d in preview.directives] == [LAYERS * MB] * 2
    assert preview.shortfalls == ()
    nowhere = await planned(tracker, "n1", "n2")
    assert nowhere.directives == ()
    assert "layers 0-10 of b" in nowhere.shortfalls[0]
    assert (tracker.mesh.ledger.all(), tracker.mesh.plan.shortfalls) == ((), ())
    assert tracker.mesh.topology is topology


async def test_a_plan_with_a_model_has_reasons_sizes_and_no_ids(tracker: Tracker) -> None:
    join(tracker, "n1")
    preview = await planned(tracker, deploy="a")
    (draft,) = preview.directives
    assert (draft.directive_id, draft.node_id, draft.kind) == ("", "n1", DirectiveKind.LOAD_SHARD)
    assert (draft.model_id, draft.layers, draft.bytes_total) == ("a", LayerRange(0, LAYERS), LAYERS * MB)
    assert draft.reason == "layers 0-10 of a have no node"
    assert preview.shortfalls == ()
    assert tracker.mesh.topology.models == {}
    assert (await planned(tracker)).directives == ()


async def test_rebalance_moves_what_the_planner_alone_leaves(tracker: Tracker) -> None:
    for index, held in enumerate("aaaabb"):
        join(tracker, f"n{index}", held)
    for model_id in "ab":
        deploy(tracker, model_id)
    tracker.mesh.tick(tracker.now() + 60)  # Others might have come back with layers until now.
    assert (await planned(tracker)).directives == ()
    moves = (await planned(tracker, rebalance=True)).directives
    assert [(d.kind, d.model_id) for d in moves] == [(DirectiveKind.DROP_SHARD, "a"), (DirectiveKind.LOAD_SHARD, "b")]
    answer = await AdminServicer(tracker).Rebalance(admin_pb2.RebalanceRequest(), None)
    issued = [convert.directive_from_proto(d) for d in answer.directives]
    assert [(d.node_id, d.kind, d.layers) for d in issued] == [(d.node_id, d.kind, d.layers) for d in moves]
    assert all(d.directive_id and d.issued_unix_seconds for d in issued)
    assert [d.directive_id for d in tracker.mesh.ledger.all()] == [d.directive_id for d in issued]


async def test_a_node_is_described_with_its_memory(tracker: Tracker) -> None:
    join(tracker, "n1", room=12 * MB)
    deploy(tracker, "a")
    told = await described(tracker, "n1")
    assert told.node == tracker.mesh.topology.nodes["n1"]
    # One byte of KV cache a token and layer.
    assert told.planned_bytes == LAYERS * (MB + KV_TOKENS)
    assert told.planned_bytes + told.free_bytes == told.node.vram_bytes - WORKSPACE_BYTES
    assert told.believed_bytes is None
    (directive,) = told.directives
    assert directive.reason == "layers 0-10 of a have no node"
    assert directive.issued_unix_seconds is not None
    member = tracker.mesh.registry.member("n1", "i")
    tracker.mesh.registry.set_node(member, replace(member.node, workspace_bytes=MB))
    tracker.mesh.tick(LATER)
    assert (await described(tracker, "n1")).planned_bytes == told.planned_bytes


async def test_a_failed_load_lowers_what_is_believed(tracker: Tracker) -> None:
    join(tracker, "n1")
    deploy(tracker, "a")
    (directive,) = tracker.mesh.ledger.all()
    tracker.apply(
        tracker.mesh.report(
            "n1",
            "i",
            directive.directive_id,
            DirectiveState.FAILED,
            (),
            LATER,
            failure="out of memory",
            failure_kind=FailureKind.NO_ROOM,
        )
    )
    told = await described(tracker, "n1")
    assert told.believed_bytes is not None
    assert told.believed_bytes < told.node.vram_bytes
    assert (told.directives[0].state, told.directives[0].failure) == (DirectiveState.FAILED, "out of memory")


async def test_events_are_what_effects_note(tracker: Tracker) -> None:
    tracker.apply(Effects(notes=(Note("one"), Note("two", logging.WARNING))))
    stream = AdminServicer(tracker).WatchEvents(admin_pb2.WatchEventsRequest(past=5, past_only=True), None)
    events = [convert_admin.event_from_proto(event) async for event in stream]
    assert [(event.number, event.level, event.text) for event in events] == [(1, "info", "one"), (2, "warning", "two")]


async def test_a_preview_of_a_deployed_model_takes_the_wish_for_it(tracker: Tracker) -> None:
    join(tracker, "n1", "a")
    join(tracker, "n2", "a")
    deploy(tracker, "a")
    request = admin_pb2.GetPlanRequest(
        deploy=admin_pb2.DeployModelRequest(model_id="a", kv_tokens=KV_TOKENS, replicas=1)
    )
    preview = convert_admin.preview_from_proto(await AdminServicer(tracker).GetPlan(request, None))
    assert [(d.kind, d.layers) for d in preview.directives] == [(DirectiveKind.DROP_SHARD, LayerRange(0, LAYERS))]
    assert tracker.mesh.deployed("a") == deployed("a", LAYERS, kv_tokens=KV_TOKENS)
