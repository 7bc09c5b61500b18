"""Linear layers with INT8 weights on a CPU: quantized by bitsandbytes, multiplied by torch.

bitsandbytes' CPU kernel rounds the activations too, and its sums in int32 and float32 took more memory than the weights
of a small model. Here activations stay as they are; see docs/memory.md for what was measured.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from services.node.core.workspace import INT8_PIECE_VALUES
from services.node.engine.kernels import padded

# Up to so many rows the kernel that reads the weights as they are is the faster one.
_FEW_ROWS = 16
# That kernel reads past the end of weights of other shapes.
_KERNEL_ROWS, _KERNEL_COLUMNS = 16, 32
# For more rows the weights are widened, so many values at a time.
_PIECE_VALUES = INT8_PIECE_VALUES
# At most this many values are quantized at once, which takes 14 bytes a value.
_QUANTIZED_VALUES = 1 << 20
_INT8_MAX = 127


class Int8Linear(nn.Module):
    """`weight` int8 `[out, in]`; `scales` float32 `[out]` is what a weight of 1 is worth. Computes in bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        values, scales = _quantize(weight)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        rows, columns = values.shape
        self._has_kernel = rows % _KERNEL_ROWS == 0 and columns % _KERNEL_COLUMNS == 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).to(torch.bfloat16).contiguous()
        few = self._has_kernel and rows.shape[0] <= _FEW_ROWS
        output = self._multiply_few(rows) if few else self._multiply(rows)
        if self.bias is not None:
            output += self.bias
        return output.view(*hidden.shape[:-1], -1).to(hidden.dtype)

    def _multiply_few(self, rows: torch.Tensor) -> torch.Tensor:
        # The kernel's own scales would have to be rounded to bfloat16.
        sums = torch._weight_int8pack_mm(rows, self.weight, rows.new_ones(len(self.weight)))
        return sums.mul_(self.scales)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """All INT8 values are exact in bfloat16."""
        num_rows, rows = rows.shape[0], padded(rows)
        output = rows.new_empty(num_rows, len(self.weight))
        end = 0
        for piece in torch.split(self.weight, max(1, _PIECE_VALUES // self.weight.shape[1])):
            begin, end = end, end + len(piece)
            sums = linear(rows, piece.to(rows.dtype))[:num_rows]
            torch.mul(sums, self.scales[begin:end], out=output[:, begin:end])
        return output


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of `[out, in]`, a few rows at a time."""
    from bitsandbytes.functional import int8_vectorwise_quant  # seconds to import, and only these shards need it

    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32)
    step = max(1, _QUANTIZED_VALUES // weight.shape[1])
    for begin in range(0, len(weight), step):
        rows = slice(begin, begin + step)
        values[rows], largest, _ = int8_vectorwise_quant(weight[rows].to(torch.float16))
        scales[rows] = largest / _INT8_MAX
    return values, scales
