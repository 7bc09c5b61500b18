"""Messages and domain types: there and back, and what makes no sense is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet import convert
from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.errors import InvalidRequest
from meshnet.model import KvPrecision, LayerRange, ModelManifest, Quantization, WeightBytes
from meshnet.topology import DeployedModel, Node, Shard, ShardState, Topology
from meshnet.v1 import common_pb2, tracker_pb2
from tests import models

IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
COUNTS = st.integers(0, 2**40)
LAYERS = st.tuples(st.integers(0, 200), st.integers(1, 50)).map(lambda r: LayerRange(r[0], r[0] + r[1]))
WEIGHTS = st.builds(WeightBytes, COUNTS, COUNTS, COUNTS, COUNTS)
MANIFESTS = st.builds(
    ModelManifest,
    model_id=IDS,
    revision=st.text(max_size=8),
    architecture=st.text(max_size=8),
    hidden_size=st.integers(1, 2**20),
    vocab_size=st.integers(1, 2**20),
    context_length=st.integers(1, 2**20),
    layers=st.lists(WEIGHTS, min_size=1, max_size=4).map(tuple),
    entry=WEIGHTS,
    kv_bytes_per_token=COUNTS,
    kv_scales_per_token=st.integers(0, 2**20),
)
SHARDS = st.builds(
    Shard,
    IDS,
    LAYERS,
    st.sampled_from(Quantization),
    st.sampled_from(ShardState),
    bytes_done=COUNTS,
    bytes_total=COUNTS,
    revision=st.text(max_size=8),
)
NODES = st.builds(
    Node,
    node_id=IDS,
    forward_address=st.text(max_size=20),
    grpc_address=st.text(max_size=20),
    vram_bytes=COUNTS,
    quantization=st.sampled_from(Quantization),
    shards=st.lists(SHARDS, max_size=3).map(tuple),
    available_models=st.frozensets(IDS, max_size=3),
    stub=st.booleans(),
    tracker_node=st.booleans(),
    num_sessions=st.integers(0, 2**31),
    resident_bytes=COUNTS,
    kv_tokens_free=COUNTS,
    software_version=st.text(max_size=8),
    device=st.text(max_size=8),
    alive=st.booleans(),
    fetches=st.booleans(),
)
DIRECTIVES = st.builds(
    Directive,
    directive_id=IDS,
    node_id=IDS,
    kind=st.sampled_from(DirectiveKind),
    model_id=IDS,
    layers=LAYERS,
    plan_version=COUNTS,
    reason=st.text(max_size=20),
    quantization=st.sampled_from(Quantization),
    revision=st.text(max_size=8),
    kv_tokens=COUNTS,
    state=st.sampled_from(DirectiveState),
    bytes_done=COUNTS,
    bytes_total=COUNTS,
    failure=st.text(max_size=20),
    kv_precision=st.sampled_from(KvPrecision),
    failure_kind=st.none() | st.sampled_from(FailureKind),
)
MODELS = st.builds(DeployedModel, MANIFESTS, COUNTS, st.integers(-9, 9), kv_precision=st.sampled_from(KvPrecision))


@given(st.lists(NODES, max_size=3), st.lists(MODELS, max_size=2))
def test_a_topology_crosses_the_wire_unchanged(nodes: list[Node], deployed: list[DeployedModel]) -> None:
    topology = Topology(7, {node.node_id: node for node in nodes}, {model.model_id: model for model in deployed})
    message = common_pb2.Topology.FromString(convert.topology_to_proto(topology).SerializeToString())
    assert convert.topology_from_proto(message) == topology


@given(DIRECTIVES)
def test_a_directive_crosses_the_wire_unchanged(directive: Directive) -> None:
    message = tracker_pb2.Directive.FromString(convert.directive_to_proto(directive).SerializeToString())
    assert convert.directive_from_proto(message) == directive


def test_who_names_no_precision_of_kv_caches_means_bfloat16() -> None:
    model = convert.model_to_proto(DeployedModel(models.manifest(), 128, kv_precision=KvPrecision.INT8))
    model.ClearField("kv_precision")
    assert convert.model_from_proto(model).kv_precision is KvPrecision.BFLOAT16
    model.kv_precision = 9  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="newer than this software"):
        convert.model_from_proto(model)


def test_what_is_unset_or_impossible_is_refused() -> None:
    node = convert.node_to_proto(models.node("a", (0, 4)))
    for broken in (
        common_pb2.Node(node_id="a"),
        common_pb2.Node(node_id="../a", quantization=common_pb2.QUANTIZATION_INT8),
        _with(node, lambda n: n.shards[0].layers.CopyFrom(common_pb2.LayerRange(start=4, end=4))),
        _with(node, lambda n: n.shards.add()),
        _with(node, lambda n: n.available_models.append("/etc/passwd")),
    ):
        with pytest.raises(InvalidRequest):
            convert.node_from_proto(broken)
    manifest = models.manifest()
    for incomplete in (replace(manifest, layers=()), replace(manifest, hidden_size=0), replace(manifest, model_id="")):
        with pytest.raises(InvalidRequest):
            convert.manifest_from_proto(convert.manifest_to_proto(incomplete))


def _with(node: common_pb2.Node, change: object) -> common_pb2.Node:
    copy = common_pb2.Node.FromString(node.SerializeToString())
    assert callable(change)
    change(copy)
    return copy
