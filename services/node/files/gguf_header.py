"""GGUF files: the model's config under the Hugging Face key names, and its tensors. Without torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from meshnet.errors import BadFiles, LoadFailed
from meshnet.model_files import ModelFiles
from services.node.files.safetensors_header import TensorHeader

# How the library names little-endian files on little-endian machines.
_NATIVE_ORDER = "I"
# Longer ones are per token, never per layer.
_LONG_ARRAY = 4096
_ROPE_FACTORS = "rope_freqs.weight"

# GGUF key behind the architecture's name -> config key.
_LLAMA_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_CONFIG_KEYS: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA_KEYS,
    "qwen2": _LLAMA_KEYS,
    "qwen3": _LLAMA_KEYS,
    "gpt2": {
        "context_length": "n_positions",
        "block_count": "n_layer",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


class HeaderReader(GGUFReader):  # type: ignore[misc]  # the library is untyped
    """Leaves out long arrays. They are vocabulary and merges, which only a tokenizer needs: of 49,000 tokens the
    library makes 165 MB of objects in over two seconds."""

    def __init__(self, path: Path) -> None:
        self.file_name = path.name
        super().__init__(path)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if GGUFValueType(raw_type) is not GGUFValueType.ARRAY or self.byte_order != _NATIVE_ORDER:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, count = struct.unpack_from("<IQ", self.data, orig_offs)
        if count <= _LONG_ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        begin = orig_offs + struct.calcsize("<IQ")
        return self._end_of_array(begin, GGUFValueType(item_type), count) - orig_offs, [], [], [GGUFValueType.ARRAY]

    def _end_of_array(self, offset: int, item_type: GGUFValueType, count: int) -> int:
        if item_type is not GGUFValueType.STRING:
            return offset + count * int(np.dtype(self.gguf_scalar_to_np[item_type]).itemsize)
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", self.data, offset)
            offset += struct.calcsize("<Q") + int(length)
        return offset


def open_gguf(files: ModelFiles) -> HeaderReader:
    """Maps the file and reads its header. Raises LoadFailed if it is no whole GGUF file."""
    try:
        return HeaderReader(files.path)
    except OSError as error:
        raise BadFiles(f"{files.path.name} of model {files.model_id!r} cannot be read: {error.strerror}") from error
    # The reader trusts the file, so that a broken one fails wherever its lengths lead.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error) as error:
        raise BadFiles(f"{files.path.name} of model {files.model_id!r} is broken or cut short: {error}") from error


def gguf_config(reader: HeaderReader) -> dict[str, Any]:
    """The config that a Hugging Face directory of this model would have. Raises LoadFailed if it is not known how."""
    architecture = _value(reader, "general.architecture")
    if architecture not in _CONFIG_KEYS:
        raise LoadFailed(f"GGUF files of architecture {architecture!r} are not supported")
    _refuse_unmapped(reader, architecture)
    tensors = gguf_tensors(reader)
    config = {
        key: value
        for gguf_key, key in _CONFIG_KEYS[architecture].items()
        if (value := _value(reader, f"{architecture}.{gguf_key}")) is not None
    }
    if "token_embd.weight" not in tensors:
        raise BadFiles("the GGUF file holds no token embedding")
    if architecture == "llama" and "head_dim" not in config:
        head_dim = _value(reader, "llama.rope.dimension_count")
        config |= {"head_dim": head_dim} if head_dim else {}
    return config | {
        "model_type": architecture,
        "architectures": [_ARCHITECTURES[architecture]],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        # The output projection is only stored where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
    }


def gguf_tensors(reader: HeaderReader) -> dict[str, TensorHeader]:
    """All tensors by their GGUF names, in row-major shapes of values (not of blocks)."""
    return {
        tensor.name: TensorHeader(
            dtype=tensor.tensor_type.name,
            shape=tuple(int(size) for size in reversed(tensor.shape)),
            file=reader.file_name,
            begin=int(tensor.data_offset),
            num_bytes=int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    }


def _value(reader: HeaderReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _refuse_unmapped(reader: HeaderReader, architecture: str) -> None:
    """What these keys and tensors mean would be lost in the config, and the model would be silently wrong."""
    if _value(reader, f"{architecture}.rope.scaling.type") not in (None, "none") or any(
        tensor.name == _ROPE_FACTORS for tensor in reader.tensors
    ):
        raise LoadFailed("GGUF files with scaled rotary embeddings are not supported; use the safetensors directory")
    if _value(reader, f"{architecture}.expert_count"):
        raise LoadFailed("GGUF files with mixtures of experts are not supported")
