"""Between generated protobuf messages and our own types. Nothing else touches both.

From the wire, everything is checked: a message that does not make sense raises InvalidRequest.
"""

from __future__ import annotations

import math
from typing import TypeVar

from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.errors import InvalidRequest
from meshnet.model import KvPrecision, LayerRange, ModelManifest, Quantization, WeightBytes, Workspace, check_model_id
from meshnet.topology import (
    Coverage,
    DeployedModel,
    Hop,
    Link,
    Node,
    RouteProbe,
    Shard,
    ShardState,
    Speed,
    Topology,
    TopologyUpdate,
    check_node_id,
)
from meshnet.v1 import admin_pb2, common_pb2, tracker_pb2

# Above anything real, and sums of such stay finite.
MAX_RATE = 1e15

K = TypeVar("K")
V = TypeVar("V")

QUANTIZATION = {
    Quantization.BFLOAT16: common_pb2.QUANTIZATION_BFLOAT16,
    Quantization.INT8: common_pb2.QUANTIZATION_INT8,
    Quantization.NF4: common_pb2.QUANTIZATION_NF4,
    Quantization.FLOAT32: common_pb2.QUANTIZATION_FLOAT32,
}
KV_PRECISION = {
    KvPrecision.BFLOAT16: common_pb2.KV_PRECISION_BFLOAT16,
    KvPrecision.INT8: common_pb2.KV_PRECISION_INT8,
}
SHARD_STATE = {
    ShardState.LOADING: common_pb2.SHARD_STATE_LOADING,
    ShardState.READY: common_pb2.SHARD_STATE_READY,
}
DIRECTIVE_KIND = {
    DirectiveKind.LOAD_SHARD: tracker_pb2.DIRECTIVE_KIND_LOAD_SHARD,
    DirectiveKind.DROP_SHARD: tracker_pb2.DIRECTIVE_KIND_DROP_SHARD,
}
DIRECTIVE_STATE = {
    DirectiveState.PENDING: tracker_pb2.DIRECTIVE_STATE_PENDING,
    DirectiveState.ACCEPTED: tracker_pb2.DIRECTIVE_STATE_ACCEPTED,
    DirectiveState.LOADING: tracker_pb2.DIRECTIVE_STATE_LOADING,
    DirectiveState.READY: tracker_pb2.DIRECTIVE_STATE_READY,
    DirectiveState.DROPPED: tracker_pb2.DIRECTIVE_STATE_DROPPED,
    DirectiveState.FAILED: tracker_pb2.DIRECTIVE_STATE_FAILED,
}
FAILURE_KIND = {
    FailureKind.NO_ROOM: tracker_pb2.DIRECTIVE_FAILURE_NO_ROOM,
    FailureKind.STALE_PLAN: tracker_pb2.DIRECTIVE_FAILURE_STALE_PLAN,
    FailureKind.BAD_FILES: tracker_pb2.DIRECTIVE_FAILURE_BAD_FILES,
    FailureKind.NO_ANSWER: tracker_pb2.DIRECTIVE_FAILURE_NO_ANSWER,
    FailureKind.OTHER: tracker_pb2.DIRECTIVE_FAILURE_OTHER,
    FailureKind.NO_SOURCE: tracker_pb2.DIRECTIVE_FAILURE_NO_SOURCE,
}


def _key(table: dict[K, V], value: V, what: str) -> K:
    for key, other in table.items():
        if other == value:
            return key
    raise InvalidRequest(f"{what} is not set, or is newer than this software")


def kv_precision_from_proto(precision: common_pb2.KvPrecision) -> KvPrecision:
    """BFLOAT16 where none is named: there was no other once."""
    if precision == common_pb2.KV_PRECISION_UNSPECIFIED:
        return KvPrecision.BFLOAT16
    return _key(KV_PRECISION, precision, "a precision of KV caches")


def layers_to_proto(layers: LayerRange) -> common_pb2.LayerRange:
    return common_pb2.LayerRange(start=layers.start, end=layers.end)


def layers_from_proto(message: common_pb2.LayerRange) -> LayerRange:
    return LayerRange(message.start, message.end)


def weights_to_proto(weights: WeightBytes) -> common_pb2.WeightBytes:
    return common_pb2.WeightBytes(
        bfloat16=weights.bfloat16, int8=weights.int8, nf4=weights.nf4, float32=weights.float32
    )


def weights_from_proto(message: common_pb2.WeightBytes) -> WeightBytes:
    return WeightBytes(message.bfloat16, message.int8, message.nf4, message.float32)


def manifest_to_proto(manifest: ModelManifest) -> common_pb2.ModelManifest:
    return common_pb2.ModelManifest(
        model_id=manifest.model_id,
        revision=manifest.revision,
        architecture=manifest.architecture,
        hidden_size=manifest.hidden_size,
        vocab_size=manifest.vocab_size,
        context_length=manifest.context_length,
        layers=[weights_to_proto(layer) for layer in manifest.layers],
        entry=weights_to_proto(manifest.entry),
        kv_bytes_per_token=manifest.kv_bytes_per_token,
        kv_scales_per_token=manifest.kv_scales_per_token,
        workspaces=[
            common_pb2.Workspace(kv_tokens=w.kv_tokens, at_precision=weights_to_proto(w.at_precision))
            for w in manifest.workspaces
        ],
    )


def manifest_from_proto(message: common_pb2.ModelManifest) -> ModelManifest:
    if not message.layers or not message.hidden_size or not message.vocab_size or not message.context_length:
        raise InvalidRequest(f"the manifest of model {message.model_id!r} is incomplete")
    return ModelManifest(
        model_id=check_model_id(message.model_id),
        revision=message.revision,
        architecture=message.architecture,
        hidden_size=message.hidden_size,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        layers=tuple(weights_from_proto(layer) for layer in message.layers),
        entry=weights_from_proto(message.entry),
        kv_bytes_per_token=message.kv_bytes_per_token,
        kv_scales_per_token=message.kv_scales_per_token,
        workspaces=tuple(Workspace(w.kv_tokens, weights_from_proto(w.at_precision)) for w in message.workspaces),
    )


def shard_to_proto(shard: Shard) -> common_pb2.Shard:
    return common_pb2.Shard(
        model_id=shard.model_id,
        layers=layers_to_proto(shard.layers),
        quantization=QUANTIZATION[shard.quantization],
        state=SHARD_STATE[shard.state],
        bytes_done=shard.bytes_done,
        bytes_total=shard.bytes_total,
        revision=shard.revision,
    )


def shard_from_proto(message: common_pb2.Shard) -> Shard:
    return Shard(
        model_id=check_model_id(message.model_id),
        layers=layers_from_proto(message.layers),
        quantization=_key(QUANTIZATION, message.quantization, "a shard's quantization"),
        state=_key(SHARD_STATE, message.state, "a shard's state"),
        bytes_done=message.bytes_done,
        bytes_total=message.bytes_total,
        revision=message.revision,
    )


def hop_to_proto(hop: Hop) -> common_pb2.Hop:
    return common_pb2.Hop(node_id=hop.node_id, layers=layers_to_proto(hop.layers))


def hop_from_proto(message: common_pb2.Hop) -> Hop:
    return Hop(check_node_id(message.node_id), layers_from_proto(message.layers))


def probe_to_proto(probe: RouteProbe) -> common_pb2.RouteProbe:
    return common_pb2.RouteProbe(
        model_id=probe.model_id,
        hops=[hop_to_proto(hop) for hop in probe.hops],
        failure=probe.failure,
        latency_seconds=probe.latency_seconds,
    )


def probe_from_proto(message: common_pb2.RouteProbe) -> RouteProbe:
    latency = message.latency_seconds if message.HasField("latency_seconds") else None
    if latency is not None and not 0 <= latency < math.inf:
        raise InvalidRequest(f"a probe cannot take {latency} s")
    return RouteProbe(
        model_id=check_model_id(message.model_id),
        hops=tuple(hop_from_proto(hop) for hop in message.hops),
        failure=message.failure,
        latency_seconds=latency,
    )


def speed_to_proto(speed: Speed) -> common_pb2.Speed:
    return common_pb2.Speed(
        model_id=speed.model_id,
        quantization=QUANTIZATION[speed.quantization],
        prefill_tokens_per_second=speed.prefill_tokens_per_second,
        decode_tokens_per_second=speed.decode_tokens_per_second,
    )


def speed_from_proto(message: common_pb2.Speed) -> Speed:
    for rate in (message.prefill_tokens_per_second, message.decode_tokens_per_second):
        if not 0 < rate < MAX_RATE:
            raise InvalidRequest(f"a layer cannot pass {rate} tokens a second")
    return Speed(
        model_id=check_model_id(message.model_id),
        quantization=_key(QUANTIZATION, message.quantization, "a speed's quantization"),
        prefill_tokens_per_second=message.prefill_tokens_per_second,
        decode_tokens_per_second=message.decode_tokens_per_second,
    )


def link_to_proto(link: Link) -> common_pb2.Link:
    return common_pb2.Link(
        node_id=link.node_id, rtt_seconds=link.rtt_seconds, bytes_per_second=link.bytes_per_second or 0.0
    )


def link_from_proto(message: common_pb2.Link) -> Link:
    if not 0 <= message.rtt_seconds < math.inf or not 0 <= message.bytes_per_second < MAX_RATE:
        raise InvalidRequest(
            f"a link cannot take {message.rtt_seconds} s there and back at {message.bytes_per_second} bytes/s"
        )
    return Link(
        node_id=check_node_id(message.node_id) if message.node_id else "",
        rtt_seconds=message.rtt_seconds,
        bytes_per_second=message.bytes_per_second or None,
    )


def node_to_proto(node: Node) -> common_pb2.Node:
    return common_pb2.Node(
        node_id=node.node_id,
        forward_address=node.forward_address,
        grpc_address=node.grpc_address,
        stub=node.stub,
        tracker_node=node.tracker_node,
        vram_bytes=node.vram_bytes,
        quantization=QUANTIZATION[node.quantization],
        shards=[shard_to_proto(shard) for shard in node.shards],
        available_models=sorted(node.available_models),
        num_sessions=node.num_sessions,
        resident_bytes=node.resident_bytes,
        kv_tokens_free=node.kv_tokens_free,
        software_version=node.software_version,
        device=node.device,
        alive=node.alive,
        probes=[probe_to_proto(probe) for probe in node.probes],
        draining=node.draining,
        fallback_quantizations=[QUANTIZATION[quantization] for quantization in node.fallbacks],
        site=node.site,
        memory_free_bytes=node.memory_free_bytes,
        workspace_bytes=node.workspace_bytes,
        queue_length=node.queue_length,
        speeds=[speed_to_proto(speed) for speed in node.speeds],
        links=[link_to_proto(link) for link in node.links],
        fetches=node.fetches,
    )


def node_from_proto(message: common_pb2.Node) -> Node:
    return Node(
        node_id=check_node_id(message.node_id),
        forward_address=message.forward_address,
        grpc_address=message.grpc_address,
        vram_bytes=message.vram_bytes,
        quantization=_key(QUANTIZATION, message.quantization, "a node's quantization"),
        shards=tuple(shard_from_proto(shard) for shard in message.shards),
        available_models=frozenset(check_model_id(model_id) for model_id in message.available_models),
        stub=message.stub,
        tracker_node=message.tracker_node,
        num_sessions=message.num_sessions,
        resident_bytes=message.resident_bytes,
        kv_tokens_free=message.kv_tokens_free,
        software_version=message.software_version,
        device=message.device,
        alive=message.alive,
        probes=tuple(probe_from_proto(probe) for probe in message.probes),
        draining=message.draining,
        fallbacks=tuple(_key(QUANTIZATION, q, "a node's quantization") for q in message.fallback_quantizations),
        site=message.site,
        memory_free_bytes=message.memory_free_bytes if message.HasField("memory_free_bytes") else None,
        workspace_bytes=message.workspace_bytes if message.HasField("workspace_bytes") else None,
        queue_length=message.queue_length,
        speeds=tuple(speed_from_proto(speed) for speed in message.speeds),
        links=tuple(link_from_proto(link) for link in message.links),
        fetches=message.fetches,
    )


def model_to_proto(model: DeployedModel) -> common_pb2.DeployedModel:
    return common_pb2.DeployedModel(
        manifest=manifest_to_proto(model.manifest),
        kv_tokens=model.kv_tokens,
        priority=model.priority,
        context_length=model.context_length,
        replicas=model.replicas or 0,
        kv_precision=KV_PRECISION[model.kv_precision],
    )


def model_from_proto(message: common_pb2.DeployedModel) -> DeployedModel:
    manifest = manifest_from_proto(message.manifest)
    return DeployedModel(
        manifest=manifest,
        kv_tokens=message.kv_tokens,
        priority=message.priority,
        max_context=None if message.context_length in (0, manifest.context_length) else message.context_length,
        replicas=message.replicas or None,
        kv_precision=kv_precision_from_proto(message.kv_precision),
    )


def topology_to_proto(topology: Topology) -> common_pb2.Topology:
    return common_pb2.Topology(
        version=topology.version,
        nodes=[node_to_proto(node) for _, node in sorted(topology.nodes.items())],
        models=[model_to_proto(model) for _, model in sorted(topology.models.items())],
    )


def topology_from_proto(message: common_pb2.Topology) -> Topology:
    nodes = [node_from_proto(node) for node in message.nodes]
    models = [model_from_proto(model) for model in message.models]
    return Topology(
        version=message.version,
        nodes={node.node_id: node for node in nodes},
        models={model.model_id: model for model in models},
    )


def update_to_proto(update: TopologyUpdate) -> common_pb2.TopologyUpdate:
    return common_pb2.TopologyUpdate(
        version=update.version,
        base_version=update.base_version,
        nodes=[node_to_proto(node) for node in update.nodes],
        removed_node_ids=update.removed_node_ids,
        models=[model_to_proto(model) for model in update.models],
        removed_model_ids=update.removed_model_ids,
    )


def update_from_proto(message: common_pb2.TopologyUpdate) -> TopologyUpdate:
    return TopologyUpdate(
        version=message.version,
        base_version=message.base_version if message.HasField("base_version") else None,
        nodes=tuple(node_from_proto(node) for node in message.nodes),
        removed_node_ids=tuple(message.removed_node_ids),
        models=tuple(model_from_proto(model) for model in message.models),
        removed_model_ids=tuple(message.removed_model_ids),
    )


def directive_to_proto(directive: Directive) -> tracker_pb2.Directive:
    return tracker_pb2.Directive(
        directive_id=directive.directive_id,
        node_id=directive.node_id,
        kind=DIRECTIVE_KIND[directive.kind],
        model_id=directive.model_id,
        layers=layers_to_proto(directive.layers),
        quantization=QUANTIZATION[directive.quantization],
        revision=directive.revision,
        kv_tokens=directive.kv_tokens,
        kv_precision=KV_PRECISION[directive.kv_precision],
        plan_version=directive.plan_version,
        reason=directive.reason,
        state=DIRECTIVE_STATE[directive.state],
        bytes_done=directive.bytes_done,
        bytes_total=directive.bytes_total,
        failure=directive.failure,
        failure_kind=FAILURE_KIND[directive.failure_kind] if directive.failure_kind else None,
        issued_unix_seconds=directive.issued_unix_seconds,
    )


def directive_from_proto(message: tracker_pb2.Directive) -> Directive:
    return Directive(
        directive_id=message.directive_id,
        node_id=message.node_id,
        kind=_key(DIRECTIVE_KIND, message.kind, "a directive's kind"),
        model_id=check_model_id(message.model_id),
        layers=layers_from_proto(message.layers),
        quantization=_key(QUANTIZATION, message.quantization, "a directive's quantization"),
        revision=message.revision,
        kv_tokens=message.kv_tokens,
        kv_precision=kv_precision_from_proto(message.kv_precision),
        plan_version=message.plan_version,
        reason=message.reason,
        state=directive_state_from_proto(message.state),
        bytes_done=message.bytes_done,
        bytes_total=message.bytes_total,
        failure=message.failure,
        failure_kind=failure_kind_from_proto(message.failure_kind),
        issued_unix_seconds=message.issued_unix_seconds if message.HasField("issued_unix_seconds") else None,
    )


def failure_kind_from_proto(kind: tracker_pb2.DirectiveFailure) -> FailureKind | None:
    """None if it is not set, or newer than this software."""
    return next((key for key, value in FAILURE_KIND.items() if value == kind), None)


def directive_state_from_proto(state: tracker_pb2.DirectiveState) -> DirectiveState:
    return _key(DIRECTIVE_STATE, state, "a directive's state")


def coverage_to_proto(coverage: Coverage, shortfall: str = "") -> admin_pb2.ModelCoverage:
    return admin_pb2.ModelCoverage(
        model_id=coverage.model_id,
        num_layers=coverage.spans[-1].layers.end,
        spans=[
            admin_pb2.CoverageSpan(
                layers=layers_to_proto(span.layers), ready_node_ids=span.ready, loading_node_ids=span.loading
            )
            for span in coverage.spans
        ],
        missing=[layers_to_proto(layers) for layers in coverage.missing],
        complete=coverage.complete,
        shortfall=shortfall,
    )


def route_to_proto(probe: RouteProbe) -> admin_pb2.Route:
    return admin_pb2.Route(
        model_id=probe.model_id,
        hops=[hop_to_proto(hop) for hop in probe.hops],
        ready=probe.ready,
        failure=probe.failure,
        latency_seconds=probe.latency_seconds,
    )
