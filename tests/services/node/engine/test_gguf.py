"""GGUF files against transformers' own reading of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshnet.model import LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.engine.gguf_weights import GgufSource
from services.node.files.gguf_config import gguf_config
from services.node.files.gguf_header import open_gguf
from services.node.files.manifest import read_manifest
from tests.parity import Reference
from tests.services.node.engine.gguf_files import write_gguf
from tests.services.node.engine.models import MODEL, TINY, mesh, prompt_of, save_model, splits_of

PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]


@pytest.fixture(scope="module")
def files(smollm2_gguf: Path) -> ModelFiles:
    return ModelFiles(MODEL, smollm2_gguf)


def test_every_tensor_is_what_transformers_reads(files: ModelFiles, smollm2_reference: Reference) -> None:
    reader = open_gguf(files)
    source = GgufSource(reader, gguf_config(reader), 30)
    wanted = dict(smollm2_reference.model.named_parameters())
    assert not source.leftovers(wanted)
    for name, parameter in wanted.items():
        assert torch.equal(source.read(name, torch.bfloat16), parameter), name


@pytest.mark.parametrize("ends", [(), (7,), (10, 20)])
def test_greedy_tokens_are_those_of_the_unsharded_model(
    files: ModelFiles, smollm2_reference: Reference, ends: tuple[int, ...]
) -> None:
    prompts = {"a": PROMPT, "b": prompt_of(150, 3, 49152)}
    with mesh(files, splits_of(30, *ends)) as shards:
        emitted = shards.generate(prompts, 16, chunk=128)
    for session, prompt in prompts.items():
        smollm2_reference.check(prompt, emitted[session])


def test_the_manifest_of_a_real_file(files: ModelFiles) -> None:
    manifest = read_manifest(files)
    assert (manifest.num_layers, manifest.hidden_size, manifest.vocab_size) == (30, 576, 49152)
    assert (manifest.context_length, manifest.architecture) == (8192, "LlamaForCausalLM")
    assert manifest.kv_bytes_per_token == 2 * 3 * 64 * 2
    assert manifest.entry.bfloat16 == (49152 + 1) * 576 * 2
    assert manifest.weight_bytes(LayerRange(0, 30), Quantization.BFLOAT16) == 269_030_016


@pytest.mark.parametrize("kind", ["llama", "llama-tied-head-dim", "qwen2", "qwen3", "gpt2"])
def test_a_gguf_file_runs_as_the_directory_that_it_was_made_of(tmp_path: Path, kind: str) -> None:
    directory = save_model(tmp_path / "directory", TINY[kind])
    model = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.bfloat16)
    file = write_gguf(tmp_path / "model.gguf", model)
    chunk = {"a": prompt_of(40)}
    with mesh(directory) as one, mesh(file, splits_of(4, 3)) as other:
        one_row, other_row = one.step(chunk), other.step(chunk)
        assert bytes(one_row["a"]) == bytes(other_row["a"])
        assert one.sample(one_row) == other.sample(other_row)
