"""What the quantizations mean in torch's terms."""

from __future__ import annotations

import torch

from meshnet.model import Quantization

# Every boundary between shards, whatever the weights are stored in.
BOUNDARY_DTYPE = torch.bfloat16


def compute_dtype(quantization: Quantization) -> torch.dtype:
    """The dtype of activations, KV cache and of all weights that are not quantized."""
    return torch.float32 if quantization is Quantization.FLOAT32 else torch.bfloat16
