"""Layers that nobody serves any more: new requests are told which, and a stream goes on when they are back."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.e2e.eight_nodes import prompts
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.streams import streams
from tests.e2e.test_failover import MODEL, NEW_TOKENS, TOLERATED_STEPS
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.parity import Reference

NODES = [NodeSpec("a", room_for(2), tracker_node=True), NodeSpec("b", room_for(2)), NodeSpec("c", room_for(2))]


def refusal(mesh: Mesh) -> dict[str, object]:
    """Of a request that comes now."""
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4}
    answer = httpx.post(f"{mesh.gateway_url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    return dict(answer.json()["error"])


def test_new_requests_are_told_and_streams_go_on_when_the_layers_are_back(tmp_path: Path) -> None:
    weights = save_tiny_llama(tmp_path, vocabulary=True)
    reference, asked = Reference(weights), prompts(2)
    with running_mesh(
        [f"{MODEL}={weights}"], NODES, kv_tokens=KV_TOKENS, tracker_options=("--deploy", MODEL), gateway=True
    ) as mesh:
        topology = mesh.wait_until_complete(MODEL)
        (lost,) = (node_id for node_id, node in topology.nodes.items() if 4 in node.layers(MODEL))
        with streams(mesh.gateway_url, MODEL, asked, NEW_TOKENS) as clients:
            clients.wait_until_all_run()
            mesh.kill_node(lost)
            # Long before the tracker misses the node, those that need it know.
            told = refusal(mesh)
            assert "4-6" in str(told["message"]), told
            mesh.start_nodes([spec for spec in NODES if spec.node_id == lost])
            for prompt, tokens in zip(asked, clients.tokens(), strict=True):
                reference.check(prompt, tokens, TOLERATED_STEPS)
        mesh.wait_until_idle()
