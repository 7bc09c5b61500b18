"""Which entry node, how many tokens, and which answer to which error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet.errors import KvFull, MissingLayers, NextHopTimeout, RouteNotReady, UnknownModel
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Node, Shard, ShardState, Topology
from services.gateway import coverage
from services.gateway.api_errors import ApiError, from_code, from_mesh_error
from services.gateway.entry import deployed_model, pick_entry
from services.gateway.limits import max_new_tokens
from tests.services.gateway.fake_mesh import is_route, model, probe, shard


def node(node_id: str, *shards: Shard, num_sessions: int = 0, stub: bool = False, failure: str | None = "") -> Node:
    """Its routes are ready, or have the failure, or have not been probed (None)."""
    return Node(
        node_id,
        "h:1",
        f"{node_id}:2",
        1,
        Quantization.BFLOAT16,
        shards,
        num_sessions=num_sessions,
        stub=stub,
        probes=tuple(probe(node_id, s, failure) for s in shards if failure is not None and is_route(s)),
    )


def topology(*nodes: Node) -> Topology:
    return Topology(1, {n.node_id: n for n in nodes}, {"m": model("m")})


def test_the_entry_node_with_the_fewest_sessions_is_picked() -> None:
    mesh = topology(node("a", shard("m"), num_sessions=2), node("b", shard("m"), num_sessions=1))
    assert [n.node_id for turn in range(3) if (n := pick_entry(mesh, "m", turn))] == ["b", "b", "b"]


def test_frames_that_wait_and_calls_under_way_count_like_sessions() -> None:
    queued = replace(node("a", shard("m"), num_sessions=1), queue_length=3)
    mesh = topology(queued, node("b", shard("m"), num_sessions=2))
    assert {n.node_id for turn in range(2) if (n := pick_entry(mesh, "m", turn))} == {"b"}
    assert {n.node_id for turn in range(2) if (n := pick_entry(mesh, "m", turn, calls={"b": 2}))} == {"a"}
    assert {n.node_id for turn in range(2) if (n := pick_entry(mesh, "m", turn, calls={"b": 1}))} == {"a", "b"}


def test_a_frame_of_each_session_that_happens_to_wait_counts_nothing() -> None:
    queued = replace(node("a", shard("m"), num_sessions=4), queue_length=4)
    mesh = topology(queued, node("b", shard("m"), num_sessions=4))
    assert {n.node_id for turn in range(2) if (n := pick_entry(mesh, "m", turn))} == {"a", "b"}


def test_equal_entry_nodes_take_turns() -> None:
    mesh = topology(node("a", shard("m")), node("b", shard("m")))
    assert {n.node_id for turn in range(2) if (n := pick_entry(mesh, "m", turn))} == {"a", "b"}


def test_a_suspect_entry_node_is_picked_only_if_there_is_no_other() -> None:
    suspect = replace(node("a", shard("m")), alive=False)
    mesh = topology(suspect, node("b", shard("m"), num_sessions=9))
    assert {n.node_id for turn in range(2) if (n := pick_entry(mesh, "m", turn))} == {"b"}
    assert pick_entry(mesh, "m", 0, avoid={"b"}) == suspect


def test_an_entry_node_without_a_whole_route_is_not_picked() -> None:
    real, stub = node("real", shard("m", 0, 30)), node("stub", shard("m", 0, 10), stub=True)
    picked = pick_entry(topology(stub, real), "m", 0)
    assert picked is not None
    assert picked.node_id == "real"


@pytest.mark.parametrize("failure", ["mute", None])
def test_only_entry_nodes_with_a_ready_route_are_picked(failure: str | None) -> None:
    mesh = topology(node("a", shard("m"), failure=failure), node("b", shard("m"), num_sessions=9))
    assert {n.node_id for turn in range(3) if (n := pick_entry(mesh, "m", turn))} == {"b"}
    assert pick_entry(mesh, "m", 0, {"b"}) is None


@pytest.mark.parametrize(("failure", "said"), [("mute", "entry node a: mute"), (None, "no token has come")])
def test_without_a_ready_route_the_failure_is_named(failure: str | None, said: str) -> None:
    with pytest.raises(RouteNotReady, match=said):
        pick_entry(topology(node("a", shard("m"), failure=failure)), "m", 0)


def test_a_ready_route_whose_hop_is_gone_does_not_count() -> None:
    stale = replace(node("a", shard("m", 0, 10)), probes=(probe("gone", shard("m")),))
    with pytest.raises(RouteNotReady):
        pick_entry(topology(stale, node("b", shard("m", 10, 30))), "m", 0)


def test_avoided_nodes_leave_none() -> None:
    assert pick_entry(topology(node("a", shard("m"))), "m", 0, {"a"}) is None


@pytest.mark.parametrize(
    ("held", "missing"),
    [((), "0-30"), ((shard("m", 10, 20),), "0-10, 20-30"), ((shard("m", 0, 30, ShardState.LOADING),), "0-30")],
)
def test_missing_layers_are_named(held: tuple[Shard, ...], missing: str) -> None:
    with pytest.raises(MissingLayers, match=missing):
        pick_entry(topology(node("a", *held)), "m", 0)


def test_an_unknown_model_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match="m"):
        deployed_model(topology(), "other")


@pytest.mark.parametrize(("asked", "expected"), [(5, 5), (None, 25), (90, 90), (0, 0)])
def test_tokens_are_as_asked_else_a_share_of_the_room(asked: int | None, expected: int) -> None:
    assert max_new_tokens(10, asked, 100, 0, "prompt") == expected


def test_a_prompt_may_fill_the_context_if_nothing_is_generated() -> None:
    assert max_new_tokens(100, 0, 100, 0, "prompt") == 0


def test_the_share_is_of_the_kv_cache_and_never_more_than_is_left() -> None:
    assert max_new_tokens(10, None, 100, 60, "prompt") == 15
    assert max_new_tokens(92, None, 100, 400, "prompt") == 8
    assert max_new_tokens(55, None, 100, 60, "prompt") == 5
    assert max_new_tokens(60, None, 100, 50, "prompt") == 1


def test_choices_divide_the_share_until_it_would_be_little() -> None:
    assert [max_new_tokens(10, None, 9000, 8000, "prompt", n) for n in (1, 2, 100)] == [2000, 1000, 256]


@pytest.mark.parametrize(("num_prompt", "asked"), [(10, 91), (100, None), (5000, 1), (101, 0)])
def test_too_long_names_limit_prompt_and_request(num_prompt: int, asked: int | None) -> None:
    with pytest.raises(ApiError) as caught:
        max_new_tokens(num_prompt, asked, 100, 0, "messages")
    assert caught.value.code == "context_length_exceeded"
    wanted = 1 if asked is None else asked
    assert {"100", str(num_prompt), str(wanted)} <= set(caught.value.message.replace(".", " ").split())


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ApiError, match="empty"):
        max_new_tokens(0, 5, 100, 0, "prompt")


def test_errors_of_the_mesh_keep_their_status_and_code() -> None:
    full = from_mesh_error(KvFull("full", retry_after=2.5))
    assert (full.status, full.code, full.headers) == (429, "kv_full", {"Retry-After": "3"})
    missing = from_mesh_error(MissingLayers("m", [LayerRange(3, 5)]))
    assert (missing.status, missing.headers["Retry-After"]) == (503, "5")
    assert "3-5" in missing.message
    assert from_mesh_error(UnknownModel("x")).code == "model_not_found"
    assert from_mesh_error(NextHopTimeout("slow", "n")).status == 504
    assert from_code("some_new_code", "?").status == 500


def test_health_is_degraded_while_layers_are_missing_or_the_tracker_is_silent() -> None:
    whole, half = topology(node("a", shard("m"))), topology(node("a", shard("m", 0, 10)))
    assert coverage.health(whole, tracker_connected=True)["status"] == "ok"
    assert coverage.health(whole, tracker_connected=False)["status"] == "degraded"
    degraded = coverage.health(half, tracker_connected=True)
    assert degraded["status"] == "degraded"
    assert degraded["models"]["m"] == {
        "complete": False,
        "missing_layers": ["10-30"],
        "ready": False,
        "failure": "layers 10-30 are not served",
    }


def test_health_tells_complete_from_ready() -> None:
    failed = coverage.health(topology(node("a", shard("m"), failure="mute")), tracker_connected=True)
    assert failed["status"] == "degraded"
    assert failed["models"]["m"] == {
        "complete": True,
        "missing_layers": [],
        "ready": False,
        "failure": "entry node a: mute",
    }
    unknown = coverage.health(topology(node("a", shard("m"), failure=None)), tracker_connected=True)
    assert unknown["status"] == "degraded"
    assert "no token has come" in unknown["models"]["m"]["failure"]
    # One entry node with a ready route is enough.
    either = topology(node("a", shard("m"), failure="mute"), node("b", shard("m")))
    assert coverage.health(either, tracker_connected=True)["status"] == "ok"


def test_the_coverage_map_tells_what_is_known_of_routes() -> None:
    mesh = topology(node("a", shard("m"), failure="mute"), node("b", shard("m")))
    told = coverage.coverage_map(mesh)["models"]["m"]
    assert (told["ready"], told["failure"]) == (True, "")
    assert told["routes"] == [
        {
            "hops": [{"node_id": node_id, "start": 0, "end": 30}],
            "ready": node_id == "b",
            "failure": "" if node_id == "b" else "mute",
            "latency_seconds": 0.5 if node_id == "b" else None,
        }
        for node_id in ("a", "b")
    ]


def test_the_coverage_map_tells_spans_and_nodes() -> None:
    mesh = topology(node("a", shard("m", 0, 10)), node("b", shard("m", 5, 20, ShardState.LOADING)))
    told = coverage.coverage_map(mesh)
    assert told["models"]["m"]["spans"] == [
        {"start": 0, "end": 5, "ready": ["a"], "loading": []},
        {"start": 5, "end": 10, "ready": ["a"], "loading": ["b"]},
        {"start": 10, "end": 20, "ready": [], "loading": ["b"]},
        {"start": 20, "end": 30, "ready": [], "loading": []},
    ]
    assert told["models"]["m"]["missing"] == [{"start": 10, "end": 30}]
    assert [n["node_id"] for n in told["nodes"]] == ["a", "b"]
    assert told["nodes"][1]["shards"][0]["state"] == "loading"
