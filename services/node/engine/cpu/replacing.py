"""Which parts of transformers' layers are replaced by those that compiled loops compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from services.node.engine.cpu.modules import CompiledLayer, GatedLayer, PackedAttention, RmsNorm, Scratch
from services.node.engine.cpu.whole import prepare
from services.node.engine.fused import FusedPart

# Those whose code is the same but for names, and who says how many tokens their attention sees; tests compare each
# with its replacement.
_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "Llama": lambda attention: None,
    "Granite": lambda attention: None,
    "Qwen2Moe": lambda attention: None,
    "Mistral": lambda attention: attention.config.sliding_window,
    "Mixtral": lambda attention: attention.config.sliding_window,
    "Qwen2": lambda attention: attention.sliding_window,
    "Qwen3": lambda attention: attention.sliding_window,
    "Qwen3Moe": lambda attention: attention.sliding_window,
    "SmolLM3": lambda attention: attention.sliding_window,
}
_NORMS = {f"{family}RMSNorm" for family in (*_WINDOWS, "Phi3")}
_GATED = {f"{family}MLP" for family in (*_WINDOWS, "Olmo", "Olmo2", "Olmo3", "StableLm")}
_ATTENTIONS = {f"{family}Attention": window for family, window in _WINDOWS.items()}
_LAYERS = {f"{family}DecoderLayer" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3")}
_PARTS = {
    "input_layernorm": RmsNorm,
    "self_attn": PackedAttention,
    "post_attention_layernorm": RmsNorm,
    "mlp": GatedLayer,
}
_SILU = {"SiLU", "SiLUActivation"}


def with_compiled_parts(module: nn.Module, device: torch.device, dtype: torch.dtype, scratch: Scratch) -> nn.Module:
    """The module, its parts and theirs, replaced where a loop computes the same.

    `dtype` is that of its activations. One thread runs all layers that share `scratch`.
    """
    if device.type != "cpu" or dtype is not torch.bfloat16:
        return module
    for name, child in list(module.named_children()):
        if not isinstance(child, FusedPart):
            setattr(module, name, with_compiled_parts(child, device, dtype, scratch))
    kind = type(module).__name__
    # Its attributes are of whatever type its family gives them.
    any_module: Any = module
    if kind in _NORMS:
        return RmsNorm(any_module.weight, any_module.variance_epsilon)
    if kind in _GATED and isinstance(any_module.gate_proj, FusedPart) and type(any_module.act_fn).__name__ in _SILU:
        gate: FusedPart = any_module.gate_proj
        return GatedLayer(gate.group.linear, any_module.down_proj, gate.out_features)
    if kind in _ATTENTIONS and isinstance(any_module.q_proj, FusedPart):
        return PackedAttention(module, _ATTENTIONS[kind](module))
    if kind in _LAYERS and all(isinstance(getattr(module, name), part) for name, part in _PARTS.items()):
        layer = CompiledLayer(module, scratch)
        prepare(layer)
        return layer
    return module
