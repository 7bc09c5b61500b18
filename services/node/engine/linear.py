"""Linear layers at each quantization, made one by one while a shard loads.

All four run on a CPU too: bfloat16 with a weight packed once for oneDNN where that exists, float32 with torch's own
kernel, int8 with weights of bitsandbytes and kernels of torch, nf4 with the CPU kernels of bitsandbytes.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from meshnet.model import Quantization
from services.node.engine.cpu.packed import packed_bits
from services.node.engine.int8_linear import Int8Linear
from services.node.engine.kernels import padded
from services.node.engine.precision import compute_dtype
from services.node.files.manifest import NF4_BLOCK

# Input values beyond this are multiplied in bfloat16: a few channels of real models are so large that in int8 they
# leave nothing of the others. The value that transformers takes too.
_INT8_OUTLIER_THRESHOLD = 6.0
# The packed layout of bitsandbytes' CPU kernel holds output rows in blocks of this many.
_NF4_PACKED_ROWS = 32
_NF4_PIECE_VALUES = 1 << 18


class PackedLinear(nn.Module):
    """A bfloat16 linear layer on the CPU whose weight oneDNN has reordered once; a third faster than reordering anew.

    Rounds like `F.linear`. The weight as it was is not kept.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight_bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        # Its memory, where loops of ours know the order.
        self.bits = packed_bits(self.packed, weight)
        self.bias = bias

    @staticmethod
    def is_available(device: torch.device) -> bool:
        return (
            device.type == "cpu"
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = padded(hidden)
        # The overload by name: to look for it anew takes as long as all else around the kernel.
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self.packed, self.bias, "none", [], "")
        return output if rows is hidden else output[..., : hidden.shape[-2], :]


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantization: Quantization,
    device: torch.device,
    half: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """A linear layer that holds `weight` (`[out, in]`, on the CPU) in the way that `quantization` says, on `device`.

    `half` is the device's dtype of 16 bits.
    """
    dtype = compute_dtype(quantization, half)
    bias = None if bias is None else bias.to(device, dtype)
    match quantization:
        case Quantization.INT8:
            return Int8Linear(weight, bias) if device.type == "cpu" else _int8(weight, bias, device, half)
        case Quantization.NF4:
            return _nf4(weight, bias, device, half)
        case Quantization.BFLOAT16 if dtype is torch.bfloat16 and PackedLinear.is_available(device):
            return PackedLinear(weight.to(dtype).contiguous(), bias)
        case _:
            return plain_linear(weight.to(device, dtype).contiguous(), bias)


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A linear layer around these very tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _int8(weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device, half: torch.dtype) -> nn.Module:
    from bitsandbytes.nn import Int8Params, Linear8bitLt  # seconds to import, and only these shards need it

    # It warns at every call that it computes scales in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    out_features, in_features = weight.shape
    linear = Linear8bitLt(
        in_features,
        out_features,
        bias=bias is not None,
        has_fp16_weights=False,
        threshold=_INT8_OUTLIER_THRESHOLD,
        device="meta",
    )
    linear.weight = Int8Params(weight.contiguous(), requires_grad=False, has_fp16_weights=False)
    return _placed(linear, bias, device, half)


def _nf4(weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device, half: torch.dtype) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit  # seconds to import, and only these shards need it

    out_features, in_features = weight.shape
    options = {"quant_type": "nf4", "compress_statistics": False}
    linear = Linear4bit(in_features, out_features, bias=bias is not None, compute_dtype=half, device="meta", **options)
    packed, state = _quantize_nf4(weight)
    linear.weight = Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=NF4_BLOCK,
        module=linear,
        bnb_quantized=True,
        **options,
    )
    linear.quant_state = state
    if out_features % _NF4_PACKED_ROWS or in_features % NF4_BLOCK:
        # It would pack all shapes alike, and fail on these; without packing it dequantizes at each call.
        linear.support_avx512bf16_for_cpu = False
    return _placed(linear, bias, device, half)


def _quantize_nf4(weight: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The packed values and bitsandbytes' QuantState of `[out, in]`, a few rows at a time: on a CPU it compares each
    value with all sixteen, in float32, and takes 64 bytes a value for it."""
    from bitsandbytes.functional import quantize_4bit

    # So many rows that no block of values has parts in two pieces.
    rows = NF4_BLOCK * max(1, _NF4_PIECE_VALUES // (NF4_BLOCK * weight.shape[1]))
    packed, scales, state = [], [], None
    for piece in torch.split(weight, rows):
        values, state = quantize_4bit(
            piece.contiguous(), blocksize=NF4_BLOCK, compress_statistics=False, quant_type="nf4"
        )
        packed.append(values)
        scales.append(state.absmax)
    assert state is not None
    state.absmax, state.shape = torch.cat(scales), weight.shape
    return torch.cat(packed), state


def _placed(linear: nn.Linear, bias: torch.Tensor | None, device: torch.device, half: torch.dtype) -> nn.Module:
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    linear = linear.to(device).eval()
    # bitsandbytes brings its weights into their final layout at the first call; better now than in a session's step.
    linear(torch.zeros(1, linear.in_features, dtype=half, device=device))
    return linear


def held_bytes(module: nn.Module) -> int:
    """Bytes that a module's tensors take, those hidden inside quantized layers included, each counted once."""
    tensors: dict[int, torch.Tensor] = {}
    packed_bytes = 0
    for part in module.modules():
        if isinstance(part, PackedLinear):
            packed_bytes += part.weight_bytes
            continue
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False), *_quantization_scales(part)]
        tensors |= {tensor.data_ptr(): tensor for tensor in own}
    return packed_bytes + sum(tensor.nbytes for tensor in tensors.values())


def _quantization_scales(module: nn.Module) -> list[torch.Tensor]:
    int8_state = getattr(module, "state", None)
    nf4_state = getattr(getattr(module, "weight", None), "quant_state", None)
    scales = (getattr(int8_state, "SCB", None), getattr(nf4_state, "absmax", None))
    return [scale for scale in scales if scale is not None]
