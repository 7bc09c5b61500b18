"""GGUF files against transformers' own reading of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
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


# Hugging Face module -> GGUF module, inside of a layer.
_LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GPT2_NAMES = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}
_ROOT_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _ROOT_NAMES:
        return f"{_ROOT_NAMES[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{(_LLAMA_NAMES | _GPT2_NAMES)[inner]}.{kind}"


def _gguf_layout(model_type: str, name: str, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """As the converter of llama.cpp stores it."""
    if model_type == "gpt2" and ".c_" in name and name.endswith("weight"):
        tensor = tensor.T
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if model_type == "llama" and heads:
        tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return np.ascontiguousarray(tensor.float().numpy())


def write_gguf(path: Path, model: Any) -> ModelFiles:
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if getattr(config, "head_dim", None):
            writer.add_key_length(config.head_dim)
    for name, tensor in model.state_dict().items():
        if not (config.tie_word_embeddings and name == "lm_head.weight"):
            writer.add_tensor(_gguf_name(name), _gguf_layout(config.model_type, name, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(MODEL, path)


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
    of_directory, of_file = read_manifest(directory), read_manifest(file)
    assert of_file.layers == of_directory.layers
    assert of_file.entry == of_directory.entry
    assert of_file.kv_bytes_per_token == of_directory.kv_bytes_per_token
