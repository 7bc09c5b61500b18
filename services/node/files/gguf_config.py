"""The config of a GGUF file's model under the Hugging Face key names. Without torch.

What llama.cpp's converter writes of a model is in its `conversion/` folder, what that project takes for granted of an
architecture in its `src/models/`; the tables here follow these two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshnet.errors import BadFiles, LoadFailed
from services.node.files.gguf_facts import Facts
from services.node.files.gguf_header import HeaderReader, header_value
from services.node.files.gguf_rotary import rotary_parameters, rotary_parameters_by_layer_type
from services.node.files.support import ARCHITECTURES

# Far more than any model has, and few enough to count up to.
_MAX_LAYERS = 1 << 12

# GGUF key behind the architecture's name -> config key.
_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_RMS = _COMMON | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_MIXTURE = {"expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
# Biases that only some models of an architecture have: config key -> the tensor of a layer that tells.
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
# Of what these say, config classes have defaults of their own.
_REQUIRED = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "expert_used_count")
# The config's name for a token, and the file's.
_TOKENS = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


@dataclass(frozen=True, slots=True)
class _Architecture:
    """`keys`: GGUF key -> config key. `told_by`: config key -> the tensor whose presence in a layer sets it. `fixed`:
    what llama.cpp takes for granted. `more`: what does not go by tables. Models with `head_dim` may have heads that
    do not divide the hidden size; with `partial_rotary`, some values of a head may stand outside of the rotation."""

    model_type: str
    keys: Mapping[str, str]
    told_by: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    more: Callable[[Facts], Mapping[str, object]] = lambda facts: {}
    rotary: bool = True
    head_dim: bool = True
    partial_rotary: bool = False


def _layer_types(facts: Facts, period: int) -> list[str]:
    """All but every `period`th layer have a sliding window, if the file does not say otherwise."""
    num_layers, pattern = facts.size("block_count"), facts.value("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        stated = period if pattern is None else facts.size("attention.sliding_window_pattern")
        pattern = [(layer + 1) % stated != 0 for layer in range(num_layers)]
    if len(pattern) != num_layers:
        raise BadFiles(f"the GGUF file gives {len(pattern)} layers' kinds of attention, there are {num_layers} layers")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _gemma2(facts: Facts) -> Mapping[str, object]:
    return _windows(facts, 2) | _gemma_scale(facts, 46)


def _gemma3(facts: Facts) -> Mapping[str, object]:
    return _windows(facts, 6) | _gemma_scale(facts, 62) | rotary_parameters_by_layer_type(facts, 10_000.0)


def _gemma_scale(facts: Facts, layers_of_27b: int) -> dict[str, object]:
    """The models of 27 billion parameters scale queries as if their heads divided the hidden size. No file says so:
    llama.cpp too knows them by the number of their layers."""
    if facts.size("block_count") == layers_of_27b:
        return {"query_pre_attn_scalar": facts.size("embedding_length") // facts.size("attention.head_count")}
    return {"query_pre_attn_scalar": facts.head_dim()}


def _windows(facts: Facts, period: int) -> dict[str, object]:
    return {"sliding_window": facts.size("attention.sliding_window"), "layer_types": _layer_types(facts, period)}


def _llama(facts: Facts) -> Mapping[str, object]:
    """Mixtral's files are those of a llama with experts, and those of Mistral cannot be told from a llama's."""
    if not facts.value("expert_count"):
        return {"mlp_bias": facts.has("ffn_gate.bias")}
    more = {"num_local_experts": facts.size("expert_count"), "num_experts_per_tok": facts.size("expert_used_count")}
    return {"model_type": "mixtral", **more, "sliding_window": None}


def _qwen2_moe(facts: Facts) -> Mapping[str, object]:
    facts.value("expert_shared_count")  # all shared experts are one, and as wide as stated
    return {"norm_topk_prob": bool(facts.value("expert_weights_norm"))}


def _qwen3_moe(facts: Facts) -> Mapping[str, object]:
    return {"norm_topk_prob": facts.value("expert_weights_norm") is not False}


def _olmo2(facts: Facts) -> Mapping[str, object]:
    """OLMo 3's files are those of an OLMo 2 with windows."""
    if not facts.value("attention.sliding_window"):
        return {}
    rotary = rotary_parameters_by_layer_type(facts, facts.number("rope.freq_base", 10_000.0))
    return {"model_type": "olmo3", **_windows(facts, 4), **rotary}


def _cohere(facts: Facts) -> Mapping[str, object]:
    return {"logit_scale": facts.number("logit_scale", 1.0) or 1.0}


def _granite(facts: Facts) -> Mapping[str, object]:
    """A scale of zero is none."""
    return {
        "attention_multiplier": facts.number("attention.scale", 0.0) or facts.head_dim() ** -0.5,
        "embedding_multiplier": facts.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": facts.number("residual_scale", 1.0) or 1.0,
        "logits_scaling": facts.number("logit_scale", 1.0) or 1.0,
    }


def _olmo(facts: Facts) -> Mapping[str, object]:
    return {"clip_qkv": facts.number("attention.clamp_kqv", 0.0) or None}


def _phi3(facts: Facts) -> Mapping[str, object]:
    slides = facts.value("attention.sliding_window")
    return {"sliding_window": facts.size("attention.sliding_window") if slides else None}


def _stablelm(facts: Facts) -> Mapping[str, object]:
    facts.value("use_parallel_residual")  # llama.cpp too goes by the norm
    return {"use_parallel_residual": not facts.has("ffn_norm.weight")}


def _falcon(facts: Facts) -> Mapping[str, object]:
    """Falcon 7B has one key for all heads; those since have groups, and one or two norms before attention."""
    heads, kv_heads = facts.size("attention.head_count"), facts.size("attention.head_count_kv")
    if kv_heads == 1:
        return {"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 1}
    if kv_heads == heads:
        raise LoadFailed("GGUF files of Falcon models with a key for each head are not supported")
    norms = 2 if facts.has("attn_norm_2.weight") else 1
    return {"new_decoder_architecture": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms}


def _gpt_oss(facts: Facts) -> Mapping[str, object]:
    facts.value("expert_gating_func")  # always a softmax over those that were chosen
    return _windows(facts, 2)


_QWEN_MIXTURE = _RMS | _MIXTURE | {"expert_count": "num_experts"}
_QWEN_MIXTURE_FIXED = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_EPSILON = "attention.layer_norm_epsilon"
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "command-r": _Architecture(
        "cohere",
        _COMMON | {_EPSILON: "layer_norm_eps"},
        told_by=_ATTENTION_BIAS | {"use_qk_norm": "attn_q_norm.weight"},
        more=_cohere,
    ),
    "falcon": _Architecture(
        "falcon",
        _COMMON | {_EPSILON: "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"},
        told_by={"bias": "attn_qkv.bias"},
        fixed={"alibi": False, "parallel_attn": True},
        more=_falcon,
        head_dim=False,
    ),
    "gemma": _Architecture("gemma", _RMS),
    "gemma2": _Architecture("gemma2", _RMS | _SOFTCAPS, more=_gemma2),
    "gemma3": _Architecture("gemma3_text", _RMS | _SOFTCAPS, more=_gemma3),
    "gpt-oss": _Architecture(
        "gpt_oss",
        _RMS | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        told_by=_ATTENTION_BIAS,
        more=_gpt_oss,
    ),
    "gpt2": _Architecture(
        "gpt2",
        {
            "context_length": "n_positions",
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            _EPSILON: "layer_norm_epsilon",
        },
        rotary=False,
        head_dim=False,
    ),
    "gptneox": _Architecture(
        "gpt_neox",
        _COMMON | {_EPSILON: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        told_by={"attention_bias": "attn_qkv.bias"},
        head_dim=False,
        partial_rotary=True,
    ),
    "granite": _Architecture("granite", _RMS, told_by=_ATTENTION_BIAS | {"mlp_bias": "ffn_gate.bias"}, more=_granite),
    "llama": _Architecture("llama", _RMS, told_by=_ATTENTION_BIAS, more=_llama),
    "olmo": _Architecture("olmo", _COMMON, told_by=_ATTENTION_BIAS, more=_olmo),
    "olmo2": _Architecture("olmo2", _RMS, told_by=_ATTENTION_BIAS, more=_olmo2),
    "phi2": _Architecture(
        "phi",
        _COMMON | {_EPSILON: "layer_norm_eps"},
        fixed={"qk_layernorm": False},
        head_dim=False,
        partial_rotary=True,
    ),
    "phi3": _Architecture("phi3", _RMS, more=_phi3, head_dim=False, partial_rotary=True),
    "qwen2": _Architecture("qwen2", _RMS),
    "qwen2moe": _Architecture(
        "qwen2_moe",
        _QWEN_MIXTURE | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        told_by={"qkv_bias": "attn_q.bias"},
        fixed=_QWEN_MIXTURE_FIXED,
        more=_qwen2_moe,
    ),
    "qwen3": _Architecture("qwen3", _RMS, told_by=_ATTENTION_BIAS),
    "qwen3moe": _Architecture(
        "qwen3_moe", _QWEN_MIXTURE, told_by=_ATTENTION_BIAS, fixed=_QWEN_MIXTURE_FIXED, more=_qwen3_moe
    ),
    # Which layers have no rotary embedding is no more stated than that the others have one.
    "smollm3": _Architecture(
        "smollm3",
        _RMS,
        told_by=_ATTENTION_BIAS | {"mlp_bias": "ffn_gate.bias"},
        fixed={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "stablelm": _Architecture(
        "stablelm",
        _COMMON | {_EPSILON: "layer_norm_eps"},
        told_by={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        more=_stablelm,
        head_dim=False,
        partial_rotary=True,
    ),
    "starcoder2": _Architecture(
        "starcoder2", _COMMON | {_EPSILON: "norm_epsilon"}, told_by={"use_bias": "attn_q.bias"}
    ),
}


def gguf_config(reader: HeaderReader, factors: Mapping[str, list[float]] | None = None) -> dict[str, Any]:
    """The config that a Hugging Face directory of this model would have.

    `factors`: the values of tensors of rotary factors, by name, where the file may have a hole in their place.
    Raises LoadFailed if it is not known how.
    """
    facts = Facts(reader, factors or {})
    architecture = _ARCHITECTURES.get(facts.architecture)
    if architecture is None:
        raise LoadFailed(
            f"GGUF files of architecture {facts.architecture!r} are not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if "token_embd.weight" not in facts.tensors:
        raise BadFiles("the GGUF file holds no token embedding")
    if facts.size("block_count") > _MAX_LAYERS:
        raise BadFiles(f"the GGUF file names {facts.size('block_count')} layers")
    config = _stated(facts, architecture)
    facts.check_used()
    tokens = {f"{token}_token_id": header_value(reader, f"tokenizer.ggml.{key}_token_id") for token, key in _TOKENS}
    return config | tokens | {"architectures": [ARCHITECTURES[config["model_type"]]]}


def _stated(facts: Facts, architecture: _Architecture) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": facts.tensors["token_embd.weight"].shape[0],
        # The output projection is only stored where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        **{key: facts.has(name) for key, name in architecture.told_by.items()},
        **architecture.fixed,
        **{key: value for gguf_key, key in architecture.keys.items() if (value := facts.value(gguf_key)) is not None},
    }
    for gguf_key in _REQUIRED:
        if (key := architecture.keys.get(gguf_key)) and key not in config:
            raise BadFiles(f"the GGUF file does not state {gguf_key}")
    if "num_key_value_heads" in architecture.keys.values():
        config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    if not architecture.head_dim:
        facts.check_divided_head_dim()
    elif architecture.model_type == "llama" and facts.value("attention.key_length") is None:
        rotated = facts.value("rope.dimension_count")
        config["head_dim"] = facts.size("rope.dimension_count") if rotated else facts.head_dim()
    else:
        config["head_dim"] = facts.head_dim()
    if architecture.rotary:
        head_dim = config.get("head_dim") or facts.head_dim()
        config |= rotary_parameters(facts, head_dim, architecture.partial_rotary)
    return {**config, **architecture.more(facts)}
