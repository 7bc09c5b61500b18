"""transformers at each precision of a node: the oracle of what shards compute.

At int8 and nf4 it is what `from_pretrained(..., quantization_config=BitsAndBytesConfig(...))` makes of the same
weights: transformers itself says which modules bitsandbytes replaces, and converts their weights. It is done here step
by step, as from_pretrained asks for one more package for it and takes no GGUF file.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from meshnet.model import Quantization
from tests.parity import Reference

# Of what a row of its packed CPU kernel is, as in services.node.engine.linear; it fails on other shapes.
_NF4_PACKED_ROWS, _NF4_BLOCK = 32, 64
QUANTIZED = (Quantization.INT8, Quantization.NF4)


def unsharded(reference: Reference, quantization: Quantization, device: str = "cpu") -> Reference:
    """The model of a float32 reference, which stays as it is, as transformers runs it at a node's precision."""
    served = _converted(reference, dtype_of(quantization), device)
    if quantization in QUANTIZED:
        quantize(served.model, quantization)
    return served


def unsharded_and_exact(
    reference: Reference, quantization: Quantization, device: str = "cpu"
) -> tuple[Reference, Reference]:
    """The same, and the same computed in float32 with just the weights that are held at that precision: what a
    quantized model means before any kernel rounds activations."""
    exact = _converted(reference, dtype_of(quantization), device)
    exact.model.float()
    served = _converted(reference, dtype_of(quantization), device)
    replaced = quantize(served.model, quantization) if quantization in QUANTIZED else frozenset()
    for name in replaced:
        module, weight = exact.model.get_submodule(name), _dequantized(served.model.get_submodule(name))
        module.weight.data = weight.T.contiguous() if isinstance(module, Conv1D) else weight
    return served, exact


def dtype_of(quantization: Quantization) -> torch.dtype:
    return torch.float32 if quantization is Quantization.FLOAT32 else torch.bfloat16


def quantize(model: Any, quantization: Quantization) -> frozenset[str]:
    """Replaces linear layers of a model as transformers would. Returns the names of those replaced."""
    # It warns at every call that it computes scales in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    quantizer = quantizer_of(quantization)
    sources = dict(model.named_modules())
    quantizer._process_model_before_weight_loading(model, device_map=None)
    replaced = {name: module for name, module in model.named_modules() if module is not sources[name]}
    convert = quantizer.get_quantize_ops().convert
    for name, module in replaced.items():
        weight = f"{name}.weight"
        module.weight = convert({weight: sources[name].weight.data}, full_layer_name=weight, model=model)[weight]
        module.bias = sources[name].bias
        if module.out_features % _NF4_PACKED_ROWS or module.in_features % _NF4_BLOCK:
            module.support_avx512bf16_for_cpu = False
    model.eval()
    return frozenset(replaced)


def quantizer_of(quantization: Quantization) -> Any:
    """transformers' own, with the settings that a node's quantization stands for. The defaults of INT8 are LLM.int8."""
    # Seconds to import, as bitsandbytes is behind them.
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

    if quantization is Quantization.INT8:
        return Bnb8BitHfQuantizer(BitsAndBytesConfig(load_in_8bit=True))
    assert quantization is Quantization.NF4
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=False,
    )
    return Bnb4BitHfQuantizer(config)


def relative_rms(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far logits `[tokens, vocab]` are from others, against the spread of these. What all of a token's logits have
    in common is taken off, as it changes no probability."""
    difference, wanted = logits.float() - wanted.float(), wanted.float()
    error, spread = (values - values.mean(-1, keepdim=True) for values in (difference, wanted))
    return float(error.square().mean().sqrt() / spread.square().mean().sqrt())


def log_probabilities(logits: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """`[tokens]` in float32: of the token that follows, in each row of `[tokens, vocab]`."""
    return logits.float().log_softmax(-1).gather(1, torch.tensor(list(targets), device=logits.device)[:, None])[:, 0]


def _converted(reference: Reference, dtype: torch.dtype, device: str) -> Reference:
    """A copy whose weights are of that dtype. Buffers stay in float32, as they do when transformers loads a model."""
    reference = copy.deepcopy(reference)
    for parameter in reference.model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    reference.model.to(device)
    return reference


def _dequantized(module: Any) -> torch.Tensor:
    """`[out, in]` in float32, of a layer that was never called: the first call packs its weight."""
    from bitsandbytes import functional

    state = getattr(module.weight, "quant_state", None)
    if state is None:
        rows: torch.Tensor = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        return rows.float()
    state = copy.copy(state)
    state.dtype = torch.float32
    weight: torch.Tensor = functional.dequantize_4bit(module.weight.data, state)
    return weight
