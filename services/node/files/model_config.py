"""What a model's config says, before anything of it is loaded, and which models this version can run. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshnet.errors import BadFiles, LoadFailed
from meshnet.model_files import CONFIG_FILE, ModelFiles
from services.node.files.gguf_header import gguf_config, open_gguf

Config = Mapping[str, Any]

# Those whose sharded output is compared with the unsharded model's in the tests. Others may scale embeddings,
# cap logits or alternate windows outside of their layers, and would be silently wrong.
SUPPORTED_MODEL_TYPES = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")

# Frequencies of these depend on the model alone; of others ("dynamic", "longrope") also on a sequence's length.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_MISTRAL_DEFAULT_WINDOW = 4096
_QWEN3_DEFAULT_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that placement needs. `context_length` is in tokens."""

    hidden_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    tied_head: bool


def read_config(files: ModelFiles) -> dict[str, Any]:
    """The model's config in Hugging Face terms. Raises LoadFailed if it cannot be read or the model cannot be run."""
    config = gguf_config(open_gguf(files)) if files.is_gguf else _read_json(files)
    check_supported(config)
    return config


def _read_json(files: ModelFiles) -> dict[str, Any]:
    try:
        config = json.loads((files.path / CONFIG_FILE).read_bytes())
    except OSError as error:
        raise BadFiles(f"{CONFIG_FILE} of model {files.model_id!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadFiles(f"{CONFIG_FILE} of model {files.model_id!r} is not valid JSON") from error
    if not isinstance(config, dict):
        raise BadFiles(f"{CONFIG_FILE} of model {files.model_id!r} is not a JSON object")
    return config


def check_supported(config: Config) -> None:
    """Raises LoadFailed if this version would not run the model, or not run it right."""
    if config.get("is_encoder_decoder"):
        raise LoadFailed("the model is an encoder-decoder; only decoder-only models can be sharded")
    if config.get("auto_map"):
        raise LoadFailed("the model needs code from its repository (auto_map), which is never run")
    if config.get("quantization_config"):
        raise LoadFailed("the weights are stored quantized; give the original weights, nodes quantize while loading")
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise LoadFailed(f"model type {model_type!r} is not supported; {', '.join(SUPPORTED_MODEL_TYPES)} are")
    if config.get("add_cross_attention"):
        raise LoadFailed("the model has cross-attention; only plain decoders can be sharded")
    _check_rotary(config)
    _check_windows(config)


def _check_rotary(config: Config) -> None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise LoadFailed("the model's rotary embedding differs between layers, which is not supported")
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in _STATIC_ROPE_TYPES:
        raise LoadFailed(f"rotary embeddings of type {rope_type!r} are not supported")


def _check_windows(config: Config) -> None:
    """A window as long as the context is none."""
    if any(layer_type != "full_attention" for layer_type in config.get("layer_types") or ()):
        raise LoadFailed("the model's layers differ in their attention, which is not supported")
    default = _MISTRAL_DEFAULT_WINDOW if config["model_type"] == "mistral" else None
    window = config.get("sliding_window", default)
    used = config.get("use_sliding_window", config["model_type"] == "mistral")
    if used and window is not None and window < _positive(config, "max_position_embeddings"):
        raise LoadFailed(f"the model attends to a sliding window of {window} tokens, which is not supported")


def model_shape(config: Config) -> ModelShape:
    """Raises LoadFailed if a size is missing or impossible."""
    hidden_size = _positive(config, "hidden_size")
    heads = _positive(config, "num_attention_heads")
    grouped = config["model_type"] not in ("gpt2", "gpt_neox")
    kv_heads = _positive(config, "num_key_value_heads") if grouped and "num_key_value_heads" in config else heads
    return ModelShape(
        hidden_size=hidden_size,
        num_layers=_positive(config, "num_hidden_layers"),
        kv_heads=kv_heads,
        head_dim=_head_dim(config, hidden_size, heads) if grouped else hidden_size // heads,
        vocab_size=_positive(config, "vocab_size"),
        context_length=_positive(config, "max_position_embeddings"),
        tied_head=bool(config.get("tie_word_embeddings", config["model_type"] == "gpt2")),
    )


def _head_dim(config: Config, hidden_size: int, heads: int) -> int:
    if config.get("head_dim"):
        return _positive(config, "head_dim")
    if config["model_type"] == "qwen3" and "head_dim" not in config:
        return _QWEN3_DEFAULT_HEAD_DIM
    return hidden_size // heads


def _positive(config: Config, key: str) -> int:
    name = _GPT2_KEYS.get(key, key) if config["model_type"] == "gpt2" and key not in config else key
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LoadFailed(f"the model's config gives {name} as {value!r}, which is no size")
    return value
