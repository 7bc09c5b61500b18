"""The coverage map and the mesh's health as JSON objects."""

from __future__ import annotations

from typing import Any

from meshnet.model import LayerRange
from meshnet.topology import Node, RouteProbe, Topology
from services.gateway.entry import why_not_ready


def health(topology: Topology, tracker_connected: bool) -> dict[str, Any]:
    """`status` is "ok" if the tracker is heard and every model is ready, else "degraded".

    A model is complete if all its layers are served, and ready if a token has come through them all: `failure` says
    why it is not.
    """
    models = {model_id: _model_health(topology, model_id) for model_id in sorted(topology.models)}
    ok = tracker_connected and all(model["ready"] for model in models.values())
    return {"status": "ok" if ok else "degraded", "tracker_connected": tracker_connected, "models": models}


def coverage_map(topology: Topology) -> dict[str, Any]:
    return {
        "topology_version": topology.version,
        "models": {model_id: _model_coverage(topology, model_id) for model_id in sorted(topology.models)},
        "nodes": [_node(node) for _, node in sorted(topology.nodes.items())],
    }


def _model_health(topology: Topology, model_id: str) -> dict[str, Any]:
    coverage = topology.coverage(model_id)
    return {
        "complete": coverage.complete,
        "missing_layers": [str(layers) for layers in coverage.missing],
        **_readiness(topology, model_id),
    }


def _readiness(topology: Topology, model_id: str) -> dict[str, Any]:
    failure = why_not_ready(topology, model_id)
    return {"ready": not failure, "failure": failure}


def _model_coverage(topology: Topology, model_id: str) -> dict[str, Any]:
    coverage = topology.coverage(model_id)
    model = topology.models[model_id]
    return {
        "num_layers": model.manifest.num_layers,
        "complete": coverage.complete,
        **_readiness(topology, model_id),
        "routes": [_route(probe) for probe in topology.probes(model_id)],
        "missing": [_layers(layers) for layers in coverage.missing],
        "spans": [
            {**_layers(span.layers), "ready": list(span.ready), "loading": list(span.loading)}
            for span in coverage.spans
        ],
        "context_length": model.context_length,
        "kv_tokens": model.kv_tokens,
        "kv_precision": model.kv_precision.value,
        "priority": model.priority,
        "revision": model.manifest.revision,
    }


def _route(probe: RouteProbe) -> dict[str, Any]:
    return {
        "hops": [{"node_id": hop.node_id, **_layers(hop.layers)} for hop in probe.hops],
        "ready": probe.ready,
        "failure": probe.failure,
        "latency_seconds": probe.latency_seconds,
    }


def _node(node: Node) -> dict[str, Any]:
    return {
        "node_id": node.node_id,
        "forward_address": node.forward_address,
        "grpc_address": node.grpc_address,
        "alive": node.alive,
        "draining": node.draining,
        "stub": node.stub,
        "tracker_node": node.tracker_node,
        "device": node.device,
        "vram_bytes": node.vram_bytes,
        "resident_bytes": node.resident_bytes,
        "quantization": node.quantization.value,
        "num_sessions": node.num_sessions,
        "kv_tokens_free": node.kv_tokens_free,
        "software_version": node.software_version,
        "available_models": sorted(node.available_models),
        "fetches": node.fetches,
        "shards": [
            {
                "model_id": shard.model_id,
                **_layers(shard.layers),
                "quantization": shard.quantization.value,
                "state": shard.state.value,
                "bytes_done": shard.bytes_done,
                "bytes_total": shard.bytes_total,
            }
            for shard in node.shards
        ],
    }


def _layers(layers: LayerRange) -> dict[str, int]:
    return {"start": layers.start, "end": layers.end}
