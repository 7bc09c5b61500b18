"""What `meshnet status --json` prints. The names are those of meshnet.topology."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from meshnet.topology import DeployedModel, RouteProbe, Topology


def status_json(topology: Topology, shortfalls: Mapping[str, str], routes: Sequence[RouteProbe]) -> str:
    """One JSON object. Sizes are in bytes, times in seconds; null: not known."""
    status = {
        "version": topology.version,
        "nodes": [asdict(node) for _, node in sorted(topology.nodes.items())],
        "models": [
            _model(topology, model, shortfalls.get(model_id, ""), routes)
            for model_id, model in sorted(topology.models.items())
        ],
    }
    return json.dumps(status, indent=2, default=sorted)


def _model(topology: Topology, model: DeployedModel, shortfall: str, routes: Sequence[RouteProbe]) -> dict[str, Any]:
    coverage = topology.coverage(model.model_id)
    return {
        "model_id": model.model_id,
        "revision": model.manifest.revision,
        "num_layers": model.manifest.num_layers,
        "context_length": model.context_length,
        "kv_tokens": model.kv_tokens,
        "kv_precision": model.kv_precision.value,
        "priority": model.priority,
        "complete": coverage.complete,
        "missing": [asdict(layers) for layers in coverage.missing],
        "spans": [asdict(span) for span in coverage.spans],
        "shortfall": shortfall,
        "routes": [_route(route) for route in routes if route.model_id == model.model_id],
    }


def _route(route: RouteProbe) -> dict[str, Any]:
    return {
        "hops": [asdict(hop) for hop in route.hops],
        "ready": route.ready,
        "failure": route.failure,
        "latency_seconds": route.latency_seconds,
    }
