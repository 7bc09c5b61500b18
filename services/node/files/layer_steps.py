"""What a step through each layer holds of memory at once, from the shapes of its tensors. Without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshnet.model import LayerStep
from services.node.files.model_config import Config, ModelShape
from services.node.files.safetensors_header import TensorHeader

# Two projections in one, of which each makes half of the outputs.
_DOUBLE = re.compile(r"(?:gate_up_proj|w13)(?:\.weight)?$")
# Stored as [in, out].
_IN_OUT = {"gpt2": re.compile(r"\.weight$"), "gpt_oss": re.compile(r"experts\.\w+$")}
# What the widest linear layer makes is held so often: gate, what is made of it, up, and their product.
_COPIES = 4
# Before and after a norm, what is added to it, and what comes in.
_HIDDEN_COPIES = 3
# torch's kernels do not know these, so that scores are held in float32.
_BY_RULES = {"gemma2": "attn_logit_softcapping", "gpt_oss": None}


def layer_step(tensors: Mapping[str, TensorHeader], layer: int, config: Config, shape: ModelShape) -> LayerStep:
    """Of one layer, whose tensors go by their names inside it."""
    in_out = _IN_OUT.get(config["model_type"])
    widest = largest = 0
    for name, tensor in tensors.items():
        if len(tensor.shape) not in (2, 3) or name.endswith("bias"):
            continue
        height, width = tensor.shape[-2:]
        outputs = width if in_out is not None and in_out.search(name) else height
        widest = max(widest, outputs // 2 if _DOUBLE.search(name) else outputs)
        largest = max(largest, height * width)
    return LayerStep(
        values=_COPIES * widest + _HIDDEN_COPIES * shape.hidden_size,
        largest_linear=largest,
        score_heads=_score_heads(config),
        window=_window(config, layer),
    )


def _score_heads(config: Config) -> int:
    model_type = config["model_type"]
    if model_type not in _BY_RULES:
        return 0
    key = _BY_RULES[model_type]
    heads = config.get("num_attention_heads")
    # Of Gemma 2 the softcap is there unless the config says null.
    return heads if isinstance(heads, int) and (key is None or config.get(key, True)) else 0


def _window(config: Config, layer: int) -> int | None:
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if isinstance(kinds, list) and layer < len(kinds) and kinds[layer] == "sliding_attention":
        return window if isinstance(window, int) else None
    return None
