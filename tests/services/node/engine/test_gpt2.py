"""GPT-2 at its real size, with seeded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshnet.model_files import ModelFiles
from tests.parity import Reference
from tests.services.node.engine.models import MODEL, mesh, prompt_of, splits_of

VOCAB = 50257


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    path: Path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config())
    model.to(torch.bfloat16).save_pretrained(path)
    return ModelFiles(MODEL, path)


@pytest.mark.parametrize("ends", [(5,), (4, 8)])
def test_greedy_tokens_are_those_of_the_unsharded_model(files: ModelFiles, ends: tuple[int, ...]) -> None:
    prompts = {"a": prompt_of(17, 1, VOCAB), "b": prompt_of(140, 2, VOCAB)}
    with mesh(files, splits_of(12, *ends)) as shards:
        emitted = shards.generate(prompts, 8, chunk=128)
    reference = Reference(files.path)
    for session, prompt in prompts.items():
        reference.check(prompt, emitted[session])
