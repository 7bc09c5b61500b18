"""`meshnet status --json`."""

from __future__ import annotations

import json
from dataclasses import replace

from meshnet.cli.status_json import status_json
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Hop, RouteProbe, Speed, Topology
from tests.models import node, topology


def test_everything_is_there_under_the_names_of_the_topology() -> None:
    speed = Speed("m", Quantization.INT8, 9000.0, 295.0)
    mesh = topology(replace(node("a", (0, 4)), speeds=(speed,), site="kitchen"))
    routes = [RouteProbe("m", (Hop("a", LayerRange(0, 4)),), latency_seconds=0.5), RouteProbe("other", ())]
    status = json.loads(status_json(mesh, {"m": "layers 4-12 fit on no node"}, routes))
    (only,), (model,) = status["nodes"], status["models"]
    assert only["node_id"] == "a"
    assert only["site"] == "kitchen"
    assert only["available_models"] == ["m"]
    assert only["workspace_bytes"] is None
    assert only["shards"][0]["layers"] == {"start": 0, "end": 4}
    assert only["speeds"] == [
        {
            "model_id": "m",
            "quantization": "int8",
            "prefill_tokens_per_second": 9000.0,
            "decode_tokens_per_second": 295.0,
        }
    ]
    assert (model["complete"], model["missing"]) == (False, [{"start": 4, "end": 12}])
    assert model["shortfall"] == "layers 4-12 fit on no node"
    assert model["routes"] == [
        {
            "hops": [{"node_id": "a", "layers": {"start": 0, "end": 4}}],
            "ready": True,
            "failure": "",
            "latency_seconds": 0.5,
        }
    ]


def test_an_empty_mesh_is_no_error() -> None:
    assert json.loads(status_json(Topology(), {}, [])) == {"version": 0, "nodes": [], "models": []}
