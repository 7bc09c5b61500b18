"""A mesh as it will be when a plan is carried out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshnet.directive import Directive, DirectiveKind
from meshnet.model import merge_layers
from meshnet.topology import DeployedModel, Node, Shard, ShardState, Topology


def planned(topology: Topology, directives: Iterable[Directive], model: DeployedModel) -> Topology:
    """With the model deployed, all that is ordered done, and all that is loading loaded."""
    nodes = {
        node_id: replace(node, shards=tuple(replace(shard, state=ShardState.READY) for shard in node.shards))
        for node_id, node in topology.nodes.items()
    }
    for directive in directives:
        nodes[directive.node_id] = _obeyed(nodes[directive.node_id], directive)
    return Topology(topology.version, nodes, topology.models | {model.model_id: model})


def _obeyed(node: Node, directive: Directive) -> Node:
    if directive.kind is DirectiveKind.LOAD_SHARD:
        shard = Shard(directive.model_id, directive.layers, directive.quantization, ShardState.READY)
        return replace(node, shards=(*node.shards, shard))
    return replace(node, shards=tuple(left for shard in node.shards for left in _without(shard, directive)))


def _without(shard: Shard, dropped: Directive) -> Iterable[Shard]:
    if shard.model_id != dropped.model_id:
        return (shard,)
    rest = set(shard.layers.layers) - set(dropped.layers.layers)
    return tuple(replace(shard, layers=layers) for layers in merge_layers(rest))
