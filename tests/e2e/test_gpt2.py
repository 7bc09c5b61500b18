"""GPT-2 at its real size and shape, with seeded random weights, over three nodes; and what float32 nodes lose."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.parity import Reference

MODEL = "gpt2"
LAYER_MB, ENTRY_MB, KV_MB = 14.2, 79, 3.2  # at bfloat16 and 1024 tokens of KV cache a layer


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(20)
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(GPT2Config()).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mesh(weights: Path) -> Iterator[Mesh]:
    nodes = [
        NodeSpec("node-0", "185MB", tracker_node=True),
        NodeSpec("node-1", "105MB"),
        NodeSpec("node-2", "105MB"),
    ]
    with running_mesh([f"{MODEL}={weights}"], nodes, deploy=[MODEL]) as running:
        yield running


def test_greedy_tokens_are_those_of_the_unsharded_model(mesh: Mesh, weights: Path) -> None:
    assert mesh.layers(MODEL) == {"node-0": ["0-4"], "node-1": ["4-8"], "node-2": ["8-12"]}
    reference = Reference(weights)
    draw = random.Random(3)
    for length in (1, 7, 129, 500):
        prompt = [draw.randrange(50257) for _ in range(length)]
        tokens = mesh.generate(MODEL, prompt, 48)
        assert len(tokens) == 48
        reference.check(prompt, tokens)
    mesh.wait_until_idle()
