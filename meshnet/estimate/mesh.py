"""What a mesh would do for one model: its nodes, its routes, and how fast they are."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from meshnet.errors import MissingLayers
from meshnet.estimate.hardware import Hardware, make_head, make_stage
from meshnet.estimate.pipeline import (
    FrameCosts,
    Machine,
    Pipeline,
    Prefill,
    Rate,
    Stage,
    Way,
    frame_seconds,
    prefill,
    stage_seconds,
    tokens_per_second,
)
from meshnet.inspection import LEAST_WORKSPACE_BYTES
from meshnet.model import BLOCK_TOKENS, LayerRange, Quantization, blocks_for
from meshnet.routing import Route, find_routes
from meshnet.topology import DeployedModel, Hop, Node, Topology

# An entry node proves as many.
MAX_ROUTES = 8
# Of stubs over loopback on one busy machine; `python -m benchmarks.estimate_error` measures it.
USUAL_FRAMES = FrameCosts(step=0.0006, row=0.0002, hop=0.0006)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the topology does not say of its nodes. `machine_of`: those that share one, by node; `way`: from a node to
    another."""

    hardware: Mapping[str, Hardware]
    way: Callable[[str, str], Way]
    machine_of: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, Machine] = field(default_factory=dict)
    frames: FrameCosts = USUAL_FRAMES


@dataclass(frozen=True, slots=True)
class Questions:
    """`prompts`: lengths in tokens. `streams`: numbers of sessions that decode at once, each with a prompt of the first
    of these lengths and half of `new_tokens` behind it."""

    prompts: tuple[int, ...] = (512, 2048)
    streams: tuple[int, ...] = (1, 4, 16, 64)
    new_tokens: int = 256

    @property
    def cached(self) -> float:
        return self.prompts[0] + self.new_tokens / 2

    @property
    def room_tokens(self) -> int:
        """What a session takes of KV cache."""
        return blocks_for(self.prompts[0] + self.new_tokens) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class NodeEstimate:
    """`free_bytes` of the memory that it lends are left beside its shards of all models and the workspace.
    `step_seconds`: of one session through its layers in the first route; None: it has none there."""

    node_id: str
    layers: tuple[LayerRange, ...]
    quantizations: tuple[Quantization, ...]
    vram_bytes: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    free_bytes: int
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class StreamsEstimate:
    """`at_once`: of so many streams as many decode at once as there is KV room for; the others wait. `limit` keeps the
    rate from being higher."""

    num_streams: int
    at_once: int
    tokens_per_second: float
    limit: str


@dataclass(frozen=True, slots=True)
class PromptEstimate:
    num_tokens: int
    seconds: float
    tokens_per_second: float
    first_token_seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """`shortfalls` say what has no place; without a route there are no rates. Prompts are of an idle mesh, through the
    first route."""

    model_id: str
    kv_tokens: int
    nodes: tuple[NodeEstimate, ...]
    shortfalls: tuple[str, ...] = ()
    routes: tuple[Route, ...] = ()
    prompts: tuple[PromptEstimate, ...] = ()
    token_seconds: float | None = None
    streams: tuple[StreamsEstimate, ...] = ()


def estimate(
    topology: Topology,
    model_id: str,
    surroundings: Surroundings,
    questions: Questions,
    shortfalls: Sequence[str] = (),
) -> Estimate:
    """Of a deployed model in a topology as it will be when all is loaded."""
    model = topology.models[model_id]
    routes = _routes(topology, model_id)
    pipelines = [make_pipeline(topology, model, route, surroundings) for route in routes]
    steps = _steps(pipelines[0], questions.cached) if pipelines else {}
    nodes = [_node(topology, model, node, steps) for _, node in sorted(topology.nodes.items())]
    told = Estimate(model_id, model.kv_tokens, tuple(nodes), tuple(shortfalls), tuple(routes))
    if not pipelines:
        return told
    machines = dict(surroundings.machines)
    room = _most_sessions(routes, model.kv_tokens // questions.room_tokens)
    cached = questions.cached
    return replace(
        told,
        prompts=tuple(_prompt(prefill(pipelines[0], machines, num_tokens)) for num_tokens in questions.prompts),
        token_seconds=frame_seconds(pipelines[0], 1, cached),
        streams=tuple(_streams(pipelines, machines, number, room, cached) for number in questions.streams),
    )


def make_pipeline(topology: Topology, model: DeployedModel, route: Route, surroundings: Surroundings) -> Pipeline:
    """A route with what its nodes compute with."""
    ids = [hop.node_id for hop in route]
    entry = topology.nodes[ids[0]]
    head = make_head(
        surroundings.hardware[ids[0]], model.manifest, _quantization(entry, model.model_id, LayerRange(0, 1))
    )
    stages = tuple(_stage(topology.nodes[hop.node_id], model, hop, surroundings) for hop in route)
    ways = tuple(surroundings.way(one, other) for one, other in pairwise(ids))
    back = surroundings.way(ids[-1], ids[0]) if ways else None
    return Pipeline(stages, head, model.manifest.hidden_size, ways, back, surroundings.frames)


def _stage(node: Node, model: DeployedModel, hop: Hop, surroundings: Surroundings) -> Stage:
    costs = make_stage(
        surroundings.hardware[node.node_id],
        model.manifest,
        hop.layers,
        _quantization(node, model.model_id, hop.layers),
        model.kv_precision,
    )
    return Stage(node.node_id, surroundings.machine_of.get(node.node_id, node.node_id), costs)


def _quantization(node: Node, model_id: str, layers: LayerRange) -> Quantization:
    """At which the node holds the first of the layers."""
    held = (shard for shard in node.shards if shard.model_id == model_id and layers.start in shard.layers)
    return next(held).quantization


def _routes(topology: Topology, model_id: str) -> list[Route]:
    """Those that entry nodes would keep, without repeats."""
    routes: dict[Route, None] = {}
    for entry in topology.entry_nodes(model_id):
        spread = zlib.crc32(entry.node_id.encode())
        try:
            found = find_routes(topology, model_id, entry.node_id, limit=MAX_ROUTES, spread=spread)
        except MissingLayers:
            continue
        routes |= dict.fromkeys(found)
    return list(routes)


def _most_sessions(routes: Sequence[Route], room: int) -> int:
    """Of which each node has room for so many, where they are spread evenly over the routes."""
    passing = Counter(node_id for route in routes for node_id in {hop.node_id for hop in route})
    return room * len(routes) // max(passing.values())


def _steps(pipeline: Pipeline, cached: float) -> dict[str, float]:
    steps: dict[str, float] = {}
    for stage in pipeline.stages:
        steps[stage.node_id] = steps.get(stage.node_id, 0.0) + stage_seconds(stage, 1, cached)
    return steps


def _node(topology: Topology, model: DeployedModel, node: Node, steps: Mapping[str, float]) -> NodeEstimate:
    weights = kv = 0
    for shard in node.shards:
        if (of := topology.models.get(shard.model_id)) is None:
            weights += shard.bytes_total
            continue
        weights += of.manifest.weight_bytes(shard.layers, shard.quantization)
        kv += len(shard.layers) * of.manifest.kv_bytes(of.kv_tokens, shard.quantization, of.kv_precision)
    predicted = (model.manifest.workspace_bytes(quantization, model.kv_tokens) for quantization in node.quantizations)
    workspace = max(LEAST_WORKSPACE_BYTES, node.workspace_bytes or 0, *predicted)
    shards = [shard for shard in node.shards if shard.model_id == model.model_id]
    return NodeEstimate(
        node_id=node.node_id,
        layers=tuple(sorted(shard.layers for shard in shards)),
        quantizations=tuple(dict.fromkeys(shard.quantization for shard in shards)),
        vram_bytes=node.vram_bytes,
        weight_bytes=weights,
        kv_bytes=kv,
        workspace_bytes=workspace,
        free_bytes=node.vram_bytes - weights - kv - workspace,
        step_seconds=steps.get(node.node_id),
    )


def _prompt(found: Prefill) -> PromptEstimate:
    return PromptEstimate(found.num_tokens, found.seconds, found.tokens_per_second, found.first_token_seconds)


def _streams(
    pipelines: Sequence[Pipeline], machines: dict[str, Machine], number: int, room: int, cached: float
) -> StreamsEstimate:
    at_once = min(number, room)
    rate = tokens_per_second(pipelines, machines, at_once, cached) if at_once else Rate(0.0, "KV cache")
    limit = "KV cache" if at_once < number else rate.limit
    return StreamsEstimate(number, at_once, rate.tokens_per_second, limit)
