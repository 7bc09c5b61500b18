"""Which models this version can run, and why it refuses others. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshnet.errors import LoadFailed

# Those whose sharded output is compared with the unsharded model's in the tests, and the class of each that does it.
# Others may scale embeddings, cap logits or alternate windows outside of their layers, and would be silently wrong.
ARCHITECTURES: Mapping[str, str] = {
    "cohere": "CohereForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}

# Frequencies of these depend on the model alone; of others ("dynamic") also on a sequence's length. Those of
# "longrope" do so only beyond the context that the model had at first, which is what such a model is served with.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LONGROPE = "longrope"
_ROTARY_BY_LAYER_TYPE = ("gemma3_text", "olmo3")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_STATE_SPACE_TYPES = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2", "minimax",
    "nemotron_h", "olmo_hybrid", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
)  # fmt: skip
_STATE_SPACE_KEYS = ("mamba_", "ssm_", "linear_num_", "state_size", "layers_block_type", "hybrid_")


def check_supported(config: Mapping[str, Any]) -> None:
    """Raises LoadFailed, with the reason, if this version would not run the model, or not run it right."""
    for reason in _reasons(config):
        raise LoadFailed(reason)


def rope_parameters(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of the model's rotary embedding, or of each that it has. Raises LoadFailed if they are none."""
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        raise LoadFailed(f"the config's rotary parameters are {stated!r}, which is no object")
    kinds: list[Mapping[str, Any]] = [value for value in stated.values() if isinstance(value, dict)]
    return kinds or [stated]


def rope_type(parameters: Mapping[str, Any]) -> object:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """From what is the matter with a whole family to what is with one model."""
    model_type = config.get("model_type")
    if config.get("is_encoder_decoder"):
        yield "the model is an encoder-decoder; only decoder-only models can be sharded"
    if _needs_code(config):
        yield "the model needs code from its repository (auto_map), which is never run"
    if model_type in _STATE_SPACE_TYPES or any(str(key).startswith(_STATE_SPACE_KEYS) for key in config):
        yield (
            f"model type {model_type!r} has layers that carry a state from token to token (state-space, or a hybrid "
            "with attention), which are not supported; layers may keep nothing of a session but keys and values"
        )
    if "text_config" in config:
        yield f"model type {model_type!r} takes more than text; only models of text alone are supported"
    if model_type not in ARCHITECTURES:
        yield (
            f"model type {model_type!r} is not supported: its sharded output was never compared with that of the "
            f"unsharded model. Supported are {', '.join(ARCHITECTURES)}"
        )
    if config.get("quantization_config"):
        yield "the weights are stored quantized; give the original weights, nodes quantize while loading"
    if config.get("add_cross_attention"):
        yield "the model has cross-attention; only plain decoders can be sharded"
    yield from _attention_reasons(config)
    if model_type == "opt":
        yield from _opt_reasons(config)


def _attention_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    for layer_type in config.get("layer_types") or ():
        if layer_type not in _LAYER_TYPES:
            yield f"the model has layers of type {layer_type!r}, which are not supported"
    if config.get("use_bidirectional_attention"):
        yield "tokens of the model attend to those after them; only causal models can be served"
    if config.get("alibi"):
        yield "the model tells positions by ALiBi, which is not supported"
    # transformers takes "yarn" for "longrope" in models of this type.
    static = ("default",) if config["model_type"] == "phi3" else _STATIC_ROPE_TYPES
    rotary = rope_parameters(config)
    if len(rotary) > 1 and config["model_type"] not in _ROTARY_BY_LAYER_TYPE:
        yield "the model's rotary embedding differs between layers, which is not supported for its type"
    for kind in map(rope_type, rotary):
        if kind not in (*static, LONGROPE):
            yield f"rotary embeddings of type {kind!r} are not supported"


def _opt_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """Of the published sizes, that of 350 million is so."""
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        yield "the model projects its embeddings to another width, which is not supported"
    if not config.get("do_layer_norm_before", True) or config.get("_remove_final_layer_norm"):
        yield "the model has no final norm, which is not supported"


def _needs_code(config: Mapping[str, Any]) -> bool:
    """Not if that code has since become a part of transformers: then the class there is taken, of the same name."""
    mapped = config.get("auto_map")
    if not mapped:
        return False
    stated = mapped.get("AutoModelForCausalLM") if isinstance(mapped, dict) else None
    return str(stated).rpartition(".")[2] != ARCHITECTURES.get(str(config.get("model_type")))
