"""Small nodes and models for the tracker's tests, and a mesh that does at once what a plan orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshnet.directive import DirectiveKind
from meshnet.model import LayerRange, ModelManifest, Quantization, WeightBytes
from meshnet.topology import DeployedModel, Node, Shard, ShardState
from services.tracker.placement import WORKSPACE_BYTES, Draft, Plan, plan

MB = 1_000_000


def manifest(
    model_id: str = "m", num_layers: int = 30, layer_bytes: int = MB, entry_bytes: int = 0, revision: str = "r1"
) -> ModelManifest:
    """A model of equal layers, as heavy at each quantization; its KV cache takes one byte a token and layer in
    bfloat16, and two at int8: as much as its one scale."""
    layer = WeightBytes(*[layer_bytes] * 4)
    return ModelManifest(
        model_id=model_id,
        revision=revision,
        architecture="llama",
        hidden_size=8,
        vocab_size=100,
        context_length=1024,
        layers=(layer,) * num_layers,
        entry=WeightBytes(*[entry_bytes] * 4),
        kv_bytes_per_token=1,
        kv_scales_per_token=1,
    )


def deployed(
    model_id: str = "m",
    num_layers: int = 30,
    *,
    layer_bytes: int = MB,
    entry_bytes: int = 0,
    kv_tokens: int = 0,
    priority: int = 0,
) -> DeployedModel:
    return DeployedModel(manifest(model_id, num_layers, layer_bytes, entry_bytes), kv_tokens, priority)


def node(
    node_id: str,
    room: int,
    *models: str,
    shards: Sequence[Shard] = (),
    stub: bool = False,
    tracker_node: bool = False,
    quantization: Quantization = Quantization.BFLOAT16,
) -> Node:
    """A node with `room` bytes beside the workspace and the files of `models` (of `m` if none is named)."""
    return Node(
        node_id=node_id,
        forward_address="127.0.0.1:1",
        grpc_address="127.0.0.1:2",
        vram_bytes=room + WORKSPACE_BYTES,
        quantization=quantization,
        shards=tuple(shards),
        available_models=frozenset(models or ("m",)),
        stub=stub,
        tracker_node=tracker_node,
    )


def fetcher(node_id: str, room: int, *models: str, shards: Sequence[Shard] = ()) -> Node:
    """As `node`, but it fetches weights, and has files of the named models alone."""
    return replace(node(node_id, room, shards=shards), available_models=frozenset(models), fetches=True)


def shard(start: int, end: int, model_id: str = "m", state: ShardState = ShardState.READY, revision: str = "") -> Shard:
    return Shard(model_id, LayerRange(start, end), Quantization.BFLOAT16, state, revision=revision)


def loads(result: Plan | Iterable[Draft]) -> list[tuple[str, str]]:
    return _brief(result, DirectiveKind.LOAD_SHARD)


def drops(result: Plan | Iterable[Draft]) -> list[tuple[str, str]]:
    return _brief(result, DirectiveKind.DROP_SHARD)


def obey(nodes: Iterable[Node], drafts: Iterable[Draft]) -> list[Node]:
    """The nodes once every directive is READY or DROPPED. Checks that each makes sense when its turn comes."""
    by_id = {n.node_id: n for n in nodes}
    for draft in drafts:
        before = by_id[draft.node_id]
        held = before.layers(draft.model_id)
        wanted = frozenset(draft.layers.layers)
        if draft.kind is DirectiveKind.LOAD_SHARD:
            assert not held & wanted, f"{draft} loads layers that are held"
            loaded = Shard(draft.model_id, draft.layers, draft.quantization, ShardState.READY, revision=draft.revision)
            shards = (*before.shards, loaded)
        else:
            assert wanted <= held, f"{draft} drops layers that are not held"
            shards = tuple(s for old in before.shards for s in _cut(old, draft))
        by_id[draft.node_id] = replace(before, shards=shards)
    return list(by_id.values())


def settle(nodes: Iterable[Node], models: Sequence[DeployedModel], rounds: int = 4) -> list[Node]:
    """The mesh after plans have been made and obeyed until one is empty; it must be within `rounds`."""
    nodes = list(nodes)
    for _ in range(rounds):
        result = plan(nodes, models)
        if not result.drafts:
            return nodes
        nodes = obey(nodes, result.drafts)
    raise AssertionError(f"not settled after {rounds} plans")


def ready_replicas(nodes: Iterable[Node], model_id: str = "m") -> Counter[int]:
    return Counter(layer for n in nodes for layer in n.layers(model_id))


def _brief(result: Plan | Iterable[Draft], kind: DirectiveKind) -> list[tuple[str, str]]:
    drafts = result.drafts if isinstance(result, Plan) else result
    return [(draft.node_id, str(draft.layers)) for draft in drafts if draft.kind is kind]


def _cut(old: Shard, draft: Draft) -> list[Shard]:
    if old.model_id != draft.model_id or not old.layers.overlaps(draft.layers):
        return [old]
    sides = ((old.layers.start, draft.layers.start), (draft.layers.end, old.layers.end))
    return [replace(old, layers=LayerRange(start, end)) for start, end in sides if start < end]
