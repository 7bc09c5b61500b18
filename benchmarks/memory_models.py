"""Models made up for `benchmarks.memory`: random ones of real sizes, and large ones that take no room on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from services.node.files.safetensors_header import SINGLE_FILE, TensorHeader
from tests.services.node.engine.models import TINY, save_model
from tests.smollm2 import smollm2_path

_LLAMA_LIKE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
    "max_position_embeddings": 2048,
}
_MIXTURE = {**_LLAMA_LIKE, "hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12}
# GPT-2 is of its real size, 124 million parameters. None: SmolLM2-135M, a GGUF file. The others have the proportions of
# their kind at 100 to 300 million parameters.
MODELS: dict[str, dict[str, Any] | None] = {
    "smollm2": None,
    "gpt2": {"model_type": "gpt2"},
    "llama": {"model_type": "llama", **_LLAMA_LIKE},
    "qwen3": {"model_type": "qwen3", **_LLAMA_LIKE, "vocab_size": 50000, "head_dim": 128, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        **_LLAMA_LIKE,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "head_dim": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": 131072,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_MIXTURE,
        "intermediate_size": 1344,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_MIXTURE,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "mlp_only_layers": [0],
        "intermediate_size": 2048,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_MIXTURE,
        "intermediate_size": 768,
        "num_local_experts": 16,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "phi3": {"model_type": "phi3", **_LLAMA_LIKE, "pad_token_id": 0},
    "opt": {
        "model_type": "opt",
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 12,
        "vocab_size": 50272,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_LLAMA_LIKE, "intermediate_size": 4096, "rotary_pct": 0.25},
}


def save_made_up(folder: Path, name: str) -> tuple[Path, Path]:
    """Where a model is, and a tiny one of its kind."""
    options = MODELS[name]
    tiny = TINY["llama" if options is None else options["model_type"].removesuffix("_text")]
    return (smollm2_path() if options is None else _save(folder, name, options)), _save(folder, f"tiny-{name}", tiny)


def _save(folder: Path, name: str, options: dict[str, Any]) -> Path:
    path = folder / name
    if not path.exists():
        save_model(path, options)
    return path


def save_sparse(folder: Path, num_layers: int, layer_bytes: int) -> tuple[Path, Path]:
    """A llama whose layers have about that many bytes, all zeros that take no room on disk; and a tiny one.

    A layer has 12 * hidden**2 weights of two bytes.
    """
    hidden = max(round((layer_bytes / 24) ** 0.5 / 64), 1) * 64
    config = TINY["llama"] | {
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
    }
    path = folder / "sparse"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    _write_holes(path / SINGLE_FILE, _llama_shapes(config))
    return path, _save(folder, "tiny-sparse", TINY["llama"])


def _llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        parts |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (hidden,)
    return shapes


def _write_holes(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * TensorHeader("BF16", shape, "", 0, 0).numel
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
