"""Norms, gated layers and attention of known architectures, computed by compiled loops.

What they compute is what transformers' modules compute in bfloat16, rounding included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from services.node.engine.attention import attend_packed
from services.node.engine.cpu.compiled import bits, loop
from services.node.engine.fused import FusedPart
from services.node.engine.segments import Segments


class RmsNorm(nn.Module):
    """Of the last dimension."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = np.float32(epsilon)
        self._bits = bits(weight.detach())
        self._loop = loop("rms_norm")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        output = torch.empty_like(rows)
        self._loop(bits(rows), self._bits, self.epsilon, bits(output))
        return output.view(hidden.shape)


class GatedLayer(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one linear layer."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, width: int) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self._width = width
        self._loop = loop("silu_mul")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(hidden)
        product = gate_up.new_empty(*gate_up.shape[:-1], self._width)
        self._loop(bits(gate_up.view(-1, 2 * self._width)), bits(product.view(-1, self._width)))
        output: torch.Tensor = self.down(product)
        return output


class PackedAttention(nn.Module):
    """Rotary attention over one packed row, with queries, keys and values made by one linear layer.

    `module` is the attention of transformers that it stands for; `window` how many tokens one sees.
    """

    def __init__(self, module: Any, window: int | None) -> None:
        super().__init__()
        part: FusedPart = module.q_proj
        self.qkv = part.group.linear
        self.output = module.o_proj
        self.norms = nn.ModuleList(norm for norm in (_norm(module, "q_norm"), _norm(module, "k_norm")) if norm)
        self.layer_idx = int(module.layer_idx)
        self.head_dim = int(module.head_dim)
        self.num_heads = part.out_features // self.head_dim
        self.kv_heads = module.k_proj.out_features // self.head_dim
        self.window = window
        self._scaling = float(module.scaling)
        self._rotates = bool(getattr(module, "use_rope", True))
        self._rotate, self._norm = loop("rotate"), loop("norm_heads")

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        qkv = self.qkv(hidden_states)[0]
        heads = bits(qkv)
        first = 0
        for norm, count in zip(self.norms, (self.num_heads, self.kv_heads), strict=False):
            self._norm(heads, first, count, norm._bits, norm.epsilon)
            first += count
        if self._rotates:
            cos, sin = position_embeddings
            self._rotate(heads, self.num_heads + self.kv_heads, bits(cos[0]), bits(sin[0]))
        attended = attend_packed(
            self.layer_idx, qkv, self.num_heads, self.kv_heads, self._scaling, self.window, segments
        )
        return self.output(attended[None]), None


def _norm(module: nn.Module, name: str) -> RmsNorm | None:
    norm = getattr(module, name, None)
    assert norm is None or isinstance(norm, RmsNorm)
    return norm
