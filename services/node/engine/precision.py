"""What the quantizations mean in torch's terms."""

from __future__ import annotations

import torch

from meshnet.model import Quantization

# Every boundary between shards, whatever the weights are stored in.
BOUNDARY_DTYPE = torch.bfloat16


# The first NVIDIA GPUs that compute in bfloat16.
_BFLOAT16_CAPABILITY = (8, 0)
# The largest value that is exact in both: what rounds to more is infinite in float16.
_FLOAT16_MAX = 65280.0


def half_dtype(device: torch.device) -> torch.dtype:
    """What a device computes in where bfloat16 is asked for: float16 on GPUs that have no bfloat16."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _BFLOAT16_CAPABILITY:
        return torch.float16
    return torch.bfloat16


def compute_dtype(quantization: Quantization, half: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The dtype of activations, KV cache and of all weights that are not quantized. `half` is the device's."""
    return torch.float32 if quantization is Quantization.FLOAT32 else half


def converted(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states in a dtype. What float16 cannot hold becomes the largest that it can, and is not infinite."""
    if dtype is torch.float16:
        hidden = hidden.clamp(-_FLOAT16_MAX, _FLOAT16_MAX)
    return hidden.to(dtype)
