"""Nodes measure the ways to each other, and what waits for a node that falls silent ends long before its deadline."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshnet import rpc
from meshnet.errors import NextHopFailed
from meshnet.model import Quantization
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from services.node.config import NodeConfig
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.processes import wait_until

MODEL = "tiny"
ROOM_FOR_TWO = room_for(2)
LEASE_SECONDS = 3.0
HOP_TIMEOUT: float = NodeConfig("", "", "", "", "", 0, Quantization.BFLOAT16).hop_timeout


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def mesh(weights: Path) -> Iterator[Mesh]:
    """The route is a, b, c."""
    nodes = [NodeSpec("a", ROOM_FOR_TWO, tracker_node=True, options=("--resume-timeout", "3"))]
    quick = ("--heartbeat", "0.5", "--lease", str(LEASE_SECONDS))
    with running_mesh(
        [f"{MODEL}={weights}"], nodes, kv_tokens=KV_TOKENS, tracker_options=("--deploy", MODEL, *quick)
    ) as running:
        running.start_nodes([NodeSpec("b", ROOM_FOR_TWO), NodeSpec("c", ROOM_FOR_TWO)])
        topology = running.wait_until_complete(MODEL)
        assert {node_id: len(node.layers(MODEL)) for node_id, node in topology.nodes.items()} == {
            "a": 2,
            "b": 2,
            "c": 2,
        }
        yield running


def stream(mesh: Mesh) -> tuple[grpc.Channel, Any]:
    """A generation that takes seconds, from a."""
    channel = grpc.insecure_channel(mesh.nodes["a"].match[2])
    request = inference_pb2.GenerateRequest(
        request_id=str(uuid.uuid4()), model_id=MODEL, prompt_token_ids=[1, 2, 3], max_new_tokens=1000
    )
    return channel, inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=HOP_TIMEOUT / 2)


def last_but_one(mesh: Mesh) -> str:
    (node_id,) = [node_id for node_id, node in mesh.topology().nodes.items() if 2 in node.layers(MODEL)]
    return node_id


def test_links_are_measured_and_reported(mesh: Mesh) -> None:
    def links(node_id: str) -> dict[str, Any]:
        return {link["node_id"]: link for link in mesh.health(node_id)["links"]}

    everyone = {"a", "b", "c"}
    for node_id in everyone:
        others = {"", *everyone} - {node_id}
        wait_until(partial(lambda i, ids: links(i).keys() == ids, node_id, others), 60, "links", mesh.logs)
        for link in links(node_id).values():
            assert 0 < link["rtt_seconds"] < 10
            assert link["bytes_per_second"] is None or link["bytes_per_second"] > 0
    assert any(link["bytes_per_second"] for node_id in everyone for link in links(node_id).values())
    mesh.generate(MODEL, [1, 2, 3], 4, node_id="a")
    mesh.wait_until_idle()


def test_a_stream_whose_hop_falls_silent_ends_when_nobody_takes_its_place(mesh: Mesh) -> None:
    mute = last_but_one(mesh)
    channel, events = stream(mesh)
    with channel:
        for _ in range(3):
            next(events)
        mesh.nodes[mute].process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as failed:
            for _ in events:
                pass
        assert rpc.error_code(failed.value) == NextHopFailed.code, failed.value
        assert f"node {mute} was lost" in failed.value.details()
    with mesh.nodes.pop(mute) as process:
        process.kill()
    mesh.wait_until_idle()


def test_hops_free_their_sessions_when_the_entry_node_falls_silent(mesh: Mesh) -> None:
    channel, events = stream(mesh)
    with channel:
        for _ in range(3):
            next(events)
        mesh.nodes["a"].process.send_signal(signal.SIGSTOP)
        assert all(mesh.health(node_id)["sessions"] == 1 for node_id in "bc")
        events.cancel()
        wait_until(lambda: all(mesh.health(node_id)["sessions"] == 0 for node_id in "bc"), 30, "freed", mesh.logs)
    with mesh.nodes.pop("a") as process:
        process.kill()
    mesh.wait_until_idle()
