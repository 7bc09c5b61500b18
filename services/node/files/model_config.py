"""What a model's config says, before anything of it is loaded. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshnet.errors import BadFiles, LoadFailed
from meshnet.model_files import CONFIG_FILE, ModelFiles
from services.node.files.gguf_config import gguf_config
from services.node.files.gguf_header import open_gguf
from services.node.files.support import LONGROPE, check_supported, rope_parameters, rope_type

Config = Mapping[str, Any]

_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# What the config classes make of a config that leaves these out, where it is not what follows from the other sizes.
_DEFAULT_KV_HEADS = {
    "gemma": 16, "gemma2": 4, "gemma3_text": 4, "gpt_oss": 8, "mistral": 8, "mixtral": 8, "qwen2_moe": 16,
    "qwen3_moe": 4, "smollm3": 4, "starcoder2": 2,
}  # fmt: skip
_DEFAULT_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64, "qwen3": 128}
_DEFAULT_TIED = ("cohere", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "opt", "smollm3", "starcoder2")
_ORIGINAL_CONTEXT = "original_max_position_embeddings"
# These have a key and a value for each head, and as wide as the heads divide the hidden size, whatever else is stated.
_UNGROUPED = ("gpt2", "gpt_neox", "opt")


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


def model_shape(config: Config) -> ModelShape:
    """Raises LoadFailed if a size is missing or impossible."""
    hidden_size = _positive(config, "hidden_size")
    model_type = config["model_type"]
    return ModelShape(
        hidden_size=hidden_size,
        num_layers=_positive(config, "num_hidden_layers"),
        kv_heads=_kv_heads(config),
        head_dim=_head_dim(config, hidden_size),
        vocab_size=_positive(config, "vocab_size"),
        context_length=_context_length(config),
        tied_head=bool(config.get("tie_word_embeddings", model_type in _DEFAULT_TIED)),
    )


def _kv_heads(config: Config) -> int:
    heads, model_type = _positive(config, "num_attention_heads"), config["model_type"]
    if model_type in _UNGROUPED:
        return heads
    if model_type == "falcon":
        return _falcon_kv_heads(config, heads)
    if "num_key_value_heads" not in config:
        return _DEFAULT_KV_HEADS.get(model_type, heads)
    return heads if config["num_key_value_heads"] is None else _positive(config, "num_key_value_heads")


def _falcon_kv_heads(config: Config, heads: int) -> int:
    if config.get("new_decoder_architecture"):
        return heads if config.get("num_kv_heads") is None else _positive(config, "num_kv_heads")
    return 1 if config.get("multi_query", True) else heads


def _head_dim(config: Config, hidden_size: int) -> int:
    model_type = config["model_type"]
    if model_type not in (*_UNGROUPED, "falcon"):
        if config.get("head_dim"):
            return _positive(config, "head_dim")
        if model_type in _DEFAULT_HEAD_DIM and "head_dim" not in config:
            return _DEFAULT_HEAD_DIM[model_type]
    return hidden_size // _positive(config, "num_attention_heads")


def _context_length(config: Config) -> int:
    """That which the model had at first, where its rotary embedding differs beyond: sessions of both sides of it could
    not be run in one step, and one that grows past it would have to be run anew."""
    lengths = [_positive(config, "max_position_embeddings")]
    for parameters in rope_parameters(config):
        if rope_type(parameters) == LONGROPE:
            stated = [source for source in (config, parameters) if _ORIGINAL_CONTEXT in source]
            lengths += [_positive(source, _ORIGINAL_CONTEXT) for source in stated or [parameters]]
    return min(lengths)


def _positive(config: Config, key: str) -> int:
    name = _GPT2_KEYS.get(key, key) if config.get("model_type") == "gpt2" and key not in config else key
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LoadFailed(f"the model's config gives {name} as {value!r}, which is no size")
    return value
