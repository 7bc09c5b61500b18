"""What others see of a node's shards: dropped layers are gone when the DROP is issued, ordered ones are loading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshnet.directive import Directive, DirectiveKind, DirectiveState
from meshnet.model import KvPrecision, LayerRange, ModelManifest, merge_layers
from meshnet.sizes import format_size
from meshnet.topology import DeployedModel, Node, Shard, ShardState
from services.tracker.revisions import is_of_revision


def published(node: Node, directives: Iterable[Directive], manifests: Mapping[str, ModelManifest]) -> Node:
    """The node as the topology shows it: with shards of the revisions that the mesh serves, which need not be named.

    `directives` are its open ones, in the order of issue; `manifests` the models that the mesh knows.
    """

    def is_served(what: Shard | Directive) -> bool:
        known = manifests.get(what.model_id)
        return (
            known is not None
            and what.layers.end <= known.num_layers
            and is_of_revision(node, what.model_id, what.revision, known.revision)
        )

    shards = tuple(replace(shard, revision="") for shard in node.shards if is_served(shard))
    for directive in directives:
        if directive.kind is DirectiveKind.DROP_SHARD:
            shards = without(shards, directive.model_id, directive.layers)
        elif is_served(directive):
            shards = with_loading(shards, replace(directive, revision=""))
    return replace(node, shards=merged(shards))


def settled(shards: Sequence[Shard], directive: Directive) -> tuple[Shard, ...]:
    """The shards that a node reports, made to agree with the directive that it reports as finished."""
    layers, model_id = directive.layers, directive.model_id
    if directive.state is DirectiveState.DROPPED:
        return without(shards, model_id, layers)
    if directive.state is DirectiveState.FAILED and directive.kind is DirectiveKind.LOAD_SHARD:
        return without(shards, model_id, layers, ShardState.LOADING)
    if directive.state is DirectiveState.READY:
        shards = without(shards, model_id, layers, ShardState.LOADING)
        return with_loading(shards, directive, ShardState.READY)
    return tuple(shards)


def without(
    shards: Iterable[Shard], model_id: str, layers: LayerRange, state: ShardState | None = None
) -> tuple[Shard, ...]:
    """The shards less some layers of a model (only those in `state`, if it is given)."""
    left: list[Shard] = []
    for shard in shards:
        if shard.model_id != model_id or not shard.layers.overlaps(layers) or state not in (None, shard.state):
            left.append(shard)
        else:
            kept = frozenset(shard.layers.layers) - frozenset(layers.layers)
            left += [_part(shard, part) for part in merge_layers(kept)]
    return tuple(left)


def with_loading(
    shards: Sequence[Shard], directive: Directive, state: ShardState = ShardState.LOADING
) -> tuple[Shard, ...]:
    """The shards and those of the directive's layers that are not among them."""
    held = {layer for shard in shards if shard.model_id == directive.model_id for layer in shard.layers.layers}
    whole = Shard(
        directive.model_id,
        directive.layers,
        directive.quantization,
        state,
        directive.bytes_done if state is ShardState.LOADING else directive.bytes_total,
        directive.bytes_total,
        directive.revision,
    )
    new = frozenset(directive.layers.layers) - held
    return (*shards, *(_part(whole, part) for part in merge_layers(new)))


def merged(shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """In order, with ready shards that touch joined into one: a route passes them as one hop."""
    result: list[Shard] = []
    for shard in sorted(shards, key=lambda s: (s.model_id, s.layers, s.state)):
        last = result[-1] if result else None
        if (
            last is not None
            and (last.model_id, last.quantization, last.layers.end)
            == (shard.model_id, shard.quantization, shard.layers.start)
            and last.state is shard.state is ShardState.READY
        ):
            result[-1] = replace(
                last,
                layers=LayerRange(last.layers.start, shard.layers.end),
                bytes_done=last.bytes_done + shard.bytes_done,
                bytes_total=last.bytes_total + shard.bytes_total,
            )
        else:
            result.append(shard)
    return tuple(result)


def described(node: Node, manifests: Sequence[ModelManifest]) -> str:
    """A node that joins, in one line of the log."""
    kind = "stub" if node.stub else "tracker-node's node" if node.tracker_node else "node"
    models = ", ".join(sorted(manifest.model_id for manifest in manifests)) or "no models"
    lends = f"{format_size(node.vram_bytes)} at {node.quantization}"
    return f"{kind} at {node.forward_address}, {lends}, files of {models}{', fetches' * node.fetches}"


def described_model(model: DeployedModel) -> str:
    """A model that was deployed, in one line of the log."""
    limits = f", at most {model.replicas} replicas" if model.replicas else ""
    context = f" for sequences of up to {model.max_context}" if model.max_context else ""
    stored = "" if model.kv_precision is KvPrecision.BFLOAT16 else f" at {model.kv_precision}"
    room = f"KV cache room for {model.kv_tokens} tokens{stored}{context}"
    return f"{model.model_id} deployed: {room}, priority {model.priority}{limits}"


def layers_of(shards: Sequence[Shard]) -> list[tuple[object, ...]]:
    """What matters of a node's shards for a plan: not how far a load has come."""
    return [(shard.model_id, shard.layers, shard.quantization, shard.state, shard.revision) for shard in shards]


def _part(shard: Shard, layers: LayerRange) -> Shard:
    share = len(layers) / len(shard.layers)
    if share == 1:
        return shard
    return replace(
        shard, layers=layers, bytes_done=int(shard.bytes_done * share), bytes_total=int(shard.bytes_total * share)
    )
