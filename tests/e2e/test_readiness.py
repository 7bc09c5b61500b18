"""Coverage is not readiness: every layer is served, but the second node cannot be reached, then can, then cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from meshnet.addresses import split_address
from tests.e2e.commands import grpcurl
from tests.e2e.mesh import SETTLE_SECONDS, Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.faults.proxy import proxy
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "tiny"
ROOM_FOR_THREE = room_for(3)
# It listens at 127.0.0.1 and says that it is here.
HIDDEN_HOST = "127.0.0.2"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def mesh(weights: Path) -> Iterator[Mesh]:
    hidden = NodeSpec("b", ROOM_FOR_THREE, options=("--advertise", HIDDEN_HOST))
    nodes = [NodeSpec("a", ROOM_FOR_THREE, tracker_node=True), hidden]
    with running_mesh([f"{MODEL}={weights}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS) as running:
        running.start_gateway(until_ready=False)
        assert running.gateway
        with running.gateway:
            yield running


def health(mesh: Mesh) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(f"{mesh.gateway_url}/health", timeout=10).json()
    return body


def wait_for_health(mesh: Mesh, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    def is_so() -> bool:
        body = health(mesh)
        return MODEL in body.get("models", {}) and condition(body)

    wait_until(is_so, SETTLE_SECONDS, what, mesh.logs)
    return health(mesh)


def the_route(mesh: Mesh) -> dict[str, Any]:
    (route,) = json.loads(grpcurl(mesh.tracker_address, "meshnet.v1.Admin/ListRoutes"))["routes"]
    assert [hop["node_id"] for hop in route["hops"]] == ["a", "b"]
    return dict(route)


def test_a_route_is_ready_when_a_token_came_through_and_until_a_hop_fails(mesh: Mesh, weights: Path) -> None:
    told = wait_for_health(mesh, lambda body: "node b" in body["models"][MODEL]["failure"], "the failure is told")
    assert told["status"] == "degraded"
    assert (told["models"][MODEL]["complete"], told["models"][MODEL]["ready"]) == (True, False)
    ask = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2}
    refused = httpx.post(f"{mesh.gateway_url}/v1/completions", json=ask, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "route_not_ready")
    assert "node b" in refused.json()["error"]["message"]
    assert "Retry-After" in refused.headers
    route = the_route(mesh)
    assert "ready" not in route
    assert "node b" in route["failure"]

    host, port = split_address(mesh.nodes["b"].match[1])
    assert host == HIDDEN_HOST
    with proxy((host, port), ("127.0.0.1", port)):
        wait_for_health(mesh, lambda body: body["status"] == "ok", "a token has come through")
        route = the_route(mesh)
        assert route["ready"] is True
        assert route["latency_seconds"] > 0
        Reference(weights).check([5, 6, 7], mesh.generate(MODEL, [5, 6, 7], 8, node_id="a"))

    # Nothing notices before a generation fails on it.
    with pytest.raises(grpc.RpcError):
        mesh.generate(MODEL, [5, 6, 7], 8, node_id="a")
    told = wait_for_health(mesh, lambda body: not body["models"][MODEL]["ready"], "the proof is taken back")
    assert told["models"][MODEL]["complete"] is True

    with proxy((host, port), ("127.0.0.1", port)):
        wait_for_health(mesh, lambda body: body["status"] == "ok", "a token has come through again")
        mesh.wait_until_idle()
