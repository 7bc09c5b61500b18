"""Who is here and who holds what, as the tracker tells it to everyone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from meshnet.errors import InvalidRequest, TopologyGap
from meshnet.model import KvPrecision, LayerRange, ModelManifest, Quantization, merge_layers

# Failure of a route that is too new for an outcome.
NOT_PROBED = "no token has come through it yet"
NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ShardState(StrEnum):
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers `[start, end)` of one model at one quantization on one node. Bytes are of weights.

    `revision` is the model's that the weights are of; empty: that of the node's own files. The topology leaves it out:
    its shards are all of the revision that the mesh serves.
    """

    model_id: str
    layers: LayerRange
    quantization: Quantization
    state: ShardState
    bytes_done: int = 0
    bytes_total: int = 0
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second through one layer of a model, as a node measured them: a chunk of a prompt, and one by one."""

    model_id: str
    quantization: Quantization
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one node to another (`node_id` empty: to the tracker), as the first of them measured it.

    `bytes_per_second` is of a large message; None: not measured yet.
    """

    node_id: str
    rtt_seconds: float
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node as it describes itself. Addresses are `host:port`; `vram_bytes` is all that it lends.

    `quantization` is the one that it prefers; `fallbacks` it accepts where that one does not fit, best first. Nodes of
    one `site` may fail together. `memory_free_bytes`: what nobody uses of the device's memory now. `workspace_bytes`:
    what steps take beside weights and KV cache. None: not known.

    `alive` is the tracker's word: false for a suspect node, whose heartbeats are overdue but whose lease still runs.
    So is `draining`: the node gets no more layers, and its own are dropped as soon as others serve them.

    `available_models` are those whose whole files it has. A node that `fetches` also takes layers of others: it fetches
    their weights from nodes that have them.
    """

    node_id: str
    forward_address: str
    grpc_address: str
    vram_bytes: int
    quantization: Quantization
    shards: tuple[Shard, ...] = ()
    available_models: frozenset[str] = frozenset()
    stub: bool = False
    tracker_node: bool = False
    num_sessions: int = 0
    resident_bytes: int = 0
    kv_tokens_free: int = 0
    software_version: str = ""
    device: str = "cpu"
    alive: bool = True
    probes: tuple[RouteProbe, ...] = ()
    draining: bool = False
    fallbacks: tuple[Quantization, ...] = ()
    site: str = ""
    memory_free_bytes: int | None = None
    workspace_bytes: int | None = None
    queue_length: int = 0
    speeds: tuple[Speed, ...] = ()
    links: tuple[Link, ...] = ()
    fetches: bool = False

    @property
    def quantizations(self) -> tuple[Quantization, ...]:
        """All that it can run, best first."""
        return (self.quantization, *(q for q in self.fallbacks if q is not self.quantization))

    def layers(self, model_id: str, *states: ShardState) -> frozenset[int]:
        """Layers of a model that the node holds in one of the states (READY unless told otherwise)."""
        wanted = states or (ShardState.READY,)
        return frozenset(
            layer
            for shard in self.shards
            if shard.model_id == model_id and shard.state in wanted
            for layer in shard.layers.layers
        )


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A model that the mesh has been asked to serve.

    `kv_tokens` is what the KV cache of every shard must have room for, stored at `kv_precision`. Models with a higher
    `priority` are placed first when capacity is short. `max_context`: longest sequence that the mesh serves, None: what
    the model was made for. `replicas`: most replicas of a layer, None: as many as there is room for.
    """

    manifest: ModelManifest
    kv_tokens: int
    priority: int = 0
    max_context: int | None = None
    replicas: int | None = None
    kv_precision: KvPrecision = KvPrecision.BFLOAT16

    @property
    def context_length(self) -> int:
        """Longest sequence that the mesh serves of this model, in tokens."""
        return min(self.max_context or self.manifest.context_length, self.manifest.context_length)

    @property
    def model_id(self) -> str:
        return self.manifest.model_id


@dataclass(frozen=True, slots=True)
class Hop:
    """One stop of a route: a node and the layers that it runs there."""

    node_id: str
    layers: LayerRange

    def __str__(self) -> str:
        return f"{self.node_id}:{self.layers}"


@dataclass(frozen=True, slots=True)
class RouteProbe:
    """What came of sending one token through a route: it took `latency_seconds`, or the `failure` says why not."""

    model_id: str
    hops: tuple[Hop, ...]
    failure: str = ""
    latency_seconds: float | None = None

    @property
    def ready(self) -> bool:
        return not self.failure


@dataclass(frozen=True, slots=True)
class CoverageSpan:
    """Consecutive layers that the same nodes hold."""

    layers: LayerRange
    ready: tuple[str, ...]
    loading: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The coverage map of one model: spans in layer order that are together all its layers."""

    model_id: str
    spans: tuple[CoverageSpan, ...]

    @property
    def missing(self) -> tuple[LayerRange, ...]:
        """Layers that no node serves, as the fewest ranges."""
        return merge_layers({layer for span in self.spans if not span.ready for layer in span.layers.layers})

    @property
    def complete(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True)
class TopologyUpdate:
    """What has changed since `base_version`; with `base_version` None a whole snapshot."""

    version: int
    base_version: int | None
    nodes: tuple[Node, ...] = ()
    removed_node_ids: tuple[str, ...] = ()
    models: tuple[DeployedModel, ...] = ()
    removed_model_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """A snapshot. `version` grows with every change."""

    version: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    models: dict[str, DeployedModel] = field(default_factory=dict)

    def update_since(self, base: Topology | None) -> TopologyUpdate:
        """What a watcher that has seen `base` must be told. Snapshots share what has not changed, so this is quick."""
        nodes, models = (base.nodes, base.models) if base else ({}, {})
        return TopologyUpdate(
            version=self.version,
            base_version=base.version if base else None,
            nodes=tuple(n for i, n in self.nodes.items() if nodes.get(i) is not n and nodes.get(i) != n),
            removed_node_ids=tuple(nodes.keys() - self.nodes.keys()),
            models=tuple(m for i, m in self.models.items() if models.get(i) is not m and models.get(i) != m),
            removed_model_ids=tuple(models.keys() - self.models.keys()),
        )

    def updated(self, update: TopologyUpdate) -> Topology:
        """The snapshot that an update leads to. Raises TopologyGap if it does not begin at this one."""
        if update.base_version not in (None, self.version):
            raise TopologyGap(f"an update from version {update.base_version}, where {self.version} is known")
        nodes, models = ({}, {}) if update.base_version is None else (dict(self.nodes), dict(self.models))
        for node_id in update.removed_node_ids:
            nodes.pop(node_id, None)
        for model_id in update.removed_model_ids:
            models.pop(model_id, None)
        nodes.update((node.node_id, node) for node in update.nodes)
        models.update((model.model_id, model) for model in update.models)
        return Topology(update.version, nodes, models)

    def coverage(self, model_id: str) -> Coverage:
        """The coverage map of a deployed model. Raises KeyError for any other."""
        num_layers = self.models[model_id].manifest.num_layers
        ready: list[list[str]] = [[] for _ in range(num_layers)]
        loading: list[list[str]] = [[] for _ in range(num_layers)]
        for node_id, node in sorted(self.nodes.items()):
            for state, by_layer in ((ShardState.READY, ready), (ShardState.LOADING, loading)):
                for layer in node.layers(model_id, state):
                    if layer < num_layers:
                        by_layer[layer].append(node_id)
        holders = [(tuple(serving), tuple(coming)) for serving, coming in zip(ready, loading, strict=True)]
        spans: list[CoverageSpan] = []
        start = 0
        for layer, held in enumerate(holders):
            if layer + 1 == len(holders) or holders[layer + 1] != held:
                spans.append(CoverageSpan(LayerRange(start, layer + 1), *held))
                start = layer + 1
        return Coverage(model_id, tuple(spans))

    def entry_nodes(self, model_id: str) -> tuple[Node, ...]:
        """Nodes that serve layer 0 of the model, by id."""
        return tuple(node for _, node in sorted(self.nodes.items()) if 0 in node.layers(model_id))

    def stands(self, model_id: str, hops: Iterable[Hop]) -> bool:
        """Whether every hop of a route is still here and serves its layers."""
        return all(
            hop.node_id in self.nodes and self.nodes[hop.node_id].layers(model_id).issuperset(hop.layers.layers)
            for hop in hops
        )

    def probes(self, model_id: str) -> tuple[RouteProbe, ...]:
        """What the model's entry nodes know of their routes, by entry node; only routes that still stand."""
        return tuple(
            probe
            for node in self.entry_nodes(model_id)
            for probe in node.probes
            if probe.model_id == model_id and self.stands(model_id, probe.hops)
        )


def check_node_id(node_id: str) -> str:
    """The id itself, if it is one. Raises InvalidRequest."""
    if not NODE_ID.fullmatch(node_id):
        raise InvalidRequest(
            f"{node_id!r} is not a node id: use up to 64 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )
    return node_id
