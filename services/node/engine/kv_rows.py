"""Keys and values of consecutive tokens as KV caches store them: as they are, or as 8-bit integers with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshnet.model import KvPrecision, ModelManifest, Quantization
from services.node.engine.precision import compute_dtype

# Eight bits of precision are enough: values are rounded against the scale as it is stored, so that what a scale loses
# is no error of the values, and the largest is at most 127 * (1 + 2**-9), which is still rounded to 127. It has the
# range of float32, so that no row is too small or too large for it.
SCALE_DTYPE = torch.bfloat16
_LARGEST = 127


@dataclass(frozen=True, slots=True)
class KvFormat:
    """What one token takes in one layer: `values` of K and V together, and as many scales, 0 if values are stored as
    they are. `dtype` is that of the stored values."""

    dtype: torch.dtype
    values: int
    scales: int = 0

    def stored(self, keys: torch.Tensor, values: torch.Tensor) -> KvRows:
        """Of K and V `[kv_heads, tokens, head_dim]` as a layer computes them. Each token's is the same whatever tokens
        are beside it."""
        if not self.scales:
            return KvRows(keys, values)
        whole_keys, key_scales = _quantized(keys)
        whole_values, value_scales = _quantized(values)
        return KvRows(whole_keys, whole_values, key_scales, value_scales)


@dataclass(frozen=True, slots=True)
class KvRows:
    """K and V `[kv_heads, tokens, head_dim]`, and the scales of each, `[kv_heads, tokens, 1]`, if they are integers."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        return self.keys, self.values, self.key_scales, self.value_scales

    @property
    def are_integers(self) -> bool:
        return self.key_scales is not None

    def of(self, tokens: slice) -> KvRows:
        return KvRows(*(tensor[:, tokens] for tensor in self.tensors))

    def of_heads(self, heads: slice) -> KvRows:
        return KvRows(*(tensor[heads] for tensor in self.tensors))

    def dequantized(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as attention reads them; views of what is stored as it is."""
        if self.key_scales is None or self.value_scales is None:
            return self.keys, self.values
        return _dequantized(self.keys, self.key_scales, dtype), _dequantized(self.values, self.value_scales, dtype)


def kv_format(
    manifest: ModelManifest, quantization: Quantization, precision: KvPrecision, half: torch.dtype = torch.bfloat16
) -> KvFormat:
    """`half` is what the device computes in where that is not float32."""
    values = manifest.kv_bytes_per_token // torch.bfloat16.itemsize
    if precision is KvPrecision.INT8:
        return KvFormat(torch.int8, values, manifest.kv_scales_per_token)
    return KvFormat(compute_dtype(quantization, half), values)


def _quantized(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and one scale a row. A row that is not all numbers has a scale that is none."""
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    scales = (largest / _LARGEST).clamp_min_(torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
    return torch.round(rows / scales.float()).to(torch.int8), scales


def _dequantized(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Integers of 8 bits are exact in bfloat16, so that there is one rounding, that of the product.
    return rows.to(dtype).mul_(scales.to(dtype))
