"""What quantized shards must compute: the reference with its weights rounded."""

from __future__ import annotations

import copy

import torch
from transformers.pytorch_utils import Conv1D

from meshnet.model import LayerRange, Quantization
from services.node.core.work import Buffer
from services.node.engine.experts import DOWN, GATE_UP, are_stacked
from services.node.engine.shard import Entry
from tests.parity import Reference


def requantized(reference: Reference, quantization: Quantization, layers: LayerRange | None = None) -> Reference:
    """The same model with linear weights rounded as bitsandbytes rounds them, in plain bfloat16: those of some layers,
    or of all."""
    reference = copy.deepcopy(reference)
    modules = next(part for part in reference.model.base_model.children() if isinstance(part, torch.nn.ModuleList))
    chosen = modules[layers.start : layers.end] if layers else modules
    for module in chosen.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            weight = module.weight.data
            rounded = _round_trip(weight.T.contiguous() if isinstance(module, Conv1D) else weight, quantization)
            module.weight.data = rounded.T.contiguous() if isinstance(module, Conv1D) else rounded
    _round_experts(chosen, quantization)
    return reference


def round_what_transformers_leaves(model: torch.nn.Module, quantization: Quantization) -> None:
    """Rounds in their place the weights that a node quantizes and transformers does not: stacks of experts, and the
    linear layers of Falcon, which are of a class of their own."""
    _round_experts(model, quantization)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and type(module).__module__.startswith("transformers."):
            module.weight.data = _round_trip(module.weight.data, quantization)


def _round_experts(model: torch.nn.Module, quantization: Quantization) -> None:
    for module in filter(are_stacked, model.modules()):
        for stack in (getattr(module, name).data for name in (GATE_UP, DOWN)):
            for expert in stack.mT if getattr(module, "is_transposed", False) else stack:
                expert.copy_(_round_trip(expert.contiguous(), quantization))


def _round_trip(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    from bitsandbytes import functional

    if quantization is Quantization.NF4:
        rounded, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
        result: torch.Tensor = functional.dequantize_4bit(rounded, state)
        return result
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (torch.round(weight.float() / scales) * scales).to(weight.dtype)


def likeness(row: Buffer, wanted: torch.Tensor, entry: Entry) -> float:
    """Cosine of the logits; what all have in common is taken off, as it changes no probability."""
    hidden = torch.frombuffer(bytearray(row), dtype=torch.bfloat16)
    with torch.inference_mode():
        own = entry.logits(hidden[None])[0].float()
    wanted = wanted.float()
    return float(torch.cosine_similarity(own - own.mean(), wanted - wanted.mean(), dim=0))
