"""Manifests, nodes and topologies made up for tests."""

from __future__ import annotations

from meshnet.model import LayerRange, ModelManifest, Quantization, WeightBytes
from meshnet.topology import DeployedModel, Node, Shard, ShardState, Topology

LAYER = WeightBytes(bfloat16=1000, int8=520, nf4=300, float32=2000)
ENTRY = WeightBytes(bfloat16=4000, int8=4000, nf4=4000, float32=8000)


def manifest(model_id: str = "m", num_layers: int = 12, hidden_size: int = 8) -> ModelManifest:
    return ModelManifest(
        model_id=model_id,
        revision="r1",
        architecture="llama",
        hidden_size=hidden_size,
        vocab_size=100,
        context_length=2048,
        layers=(LAYER,) * num_layers,
        entry=ENTRY,
        kv_bytes_per_token=4,
    )


def node(node_id: str, *layers: tuple[int, int], model_id: str = "m", stub: bool = False, sessions: int = 0) -> Node:
    """A node that serves these layer ranges."""
    return Node(
        node_id=node_id,
        forward_address="127.0.0.1:1",
        grpc_address="127.0.0.1:2",
        vram_bytes=10**6,
        quantization=Quantization.BFLOAT16,
        shards=tuple(
            Shard(model_id, LayerRange(*layer_range), Quantization.BFLOAT16, ShardState.READY) for layer_range in layers
        ),
        available_models=frozenset({model_id}),
        stub=stub,
        num_sessions=sessions,
    )


def topology(*nodes: Node, model_id: str = "m", num_layers: int = 12) -> Topology:
    model = DeployedModel(manifest(model_id, num_layers), kv_tokens=2048)
    return Topology(1, {node.node_id: node for node in nodes}, {model_id: model})
