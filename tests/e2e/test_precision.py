"""Nodes of every quantization on one route, and real float32 nodes, on a tiny model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.parity import Reference

MODEL = "tiny"


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
    # Quantized weights give other tokens than bfloat16 ones now and then, but not other tokens altogether.
    logits = Reference(weights).logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    in_top_ten = [token in row.topk(10).indices.tolist() for row, token in zip(logits, tokens, strict=True)]
    assert sum(in_top_ten) >= 20
    mesh.wait_until_idle()
