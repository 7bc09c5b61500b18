"""Nodes of every quantization on one route, and real float32 nodes, on a tiny model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshnet.model import KvPrecision
from tests.e2e.commands import meshnet
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.parity import Reference

MODEL = "tiny"
# In each layer 13.8 MB at int8, where keys and values of two heads of 16 values have a scale of two bytes. The nodes
# have room for four, two and two such layers. At bfloat16 each has room for one.
INT8_KV_TOKENS = 192_000


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def mesh(weights: Path) -> Iterator[Mesh]:
    # Room for two of the six layers each.
    nodes = [
        NodeSpec("a", room_for(4), quantization="float32", tracker_node=True),
        NodeSpec("b", room_for(2), quantization="int8"),
        NodeSpec("c", room_for(2), quantization="nf4"),
    ]
    with running_mesh([f"{MODEL}={weights}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS) as running:
        yield running


def test_nodes_of_all_quantizations_share_a_route(mesh: Mesh, weights: Path) -> None:
    assert mesh.layers(MODEL) == {"a": ["0-2"], "b": ["2-4"], "c": ["4-6"]}
    draw = random.Random(1)
    prompt = [draw.randrange(512) for _ in range(150)]
    tokens = mesh.generate(MODEL, prompt, 24)
    assert len(tokens) == 24
    assert tokens == mesh.generate(MODEL, prompt, 24)
    assert _in_top_ten(weights, prompt, tokens) >= 20
    mesh.wait_until_idle()


def test_kv_caches_at_int8_fit_where_those_at_bfloat16_do_not(mesh: Mesh, weights: Path) -> None:
    at = ("--tracker", mesh.tracker_address)
    deploy = (MODEL, "--kv-tokens", str(INT8_KV_TOKENS), *at)
    meshnet("undeploy", MODEL, *at)
    mesh.wait_for(lambda topology: not any(n.shards for n in topology.nodes.values()), "all layers are dropped")
    assert "largest free" in meshnet("plan", "--deploy", *deploy)
    assert "largest free" not in meshnet("plan", "--deploy", *deploy, "--kv", "int8")
    meshnet("deploy", *deploy, "--kv", "int8")
    topology = mesh.wait_until_complete(MODEL)
    assert topology.models[MODEL].kv_precision is KvPrecision.INT8
    assert "KV cache at int8" in meshnet("status", *at)
    assert mesh.layers(MODEL)["a"] == ["0-4"]
    draw = random.Random(1)
    prompt = [draw.randrange(512) for _ in range(150)]
    tokens = mesh.generate(MODEL, prompt, 24)
    assert _in_top_ten(weights, prompt, tokens) >= 20
    mesh.wait_until_idle()


def _in_top_ten(weights: Path, prompt: list[int], tokens: list[int]) -> int:
    """Quantized weights and caches give other tokens now and then, but not other tokens altogether."""
    logits = Reference(weights).logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    return sum(token in row.topk(10).indices.tolist() for row, token in zip(logits, tokens, strict=True))
