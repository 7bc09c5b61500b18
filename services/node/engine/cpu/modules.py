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
        self._loop, self._add_loop = loop("rms_norm"), loop("add_rms_norm")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        output = torch.empty_like(rows)
        self._loop(bits(rows), self._bits, self.epsilon, bits(output))
        return output.view(hidden.shape)

    def of_sum(self, rows: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of `[rows, width]` and as many more, and the norm of the sum."""
        total, output = torch.empty_like(rows), torch.empty_like(rows)
        self._add_loop(bits(rows), bits(more), self._bits, self.epsilon, bits(total), bits(output))
        return total, output


class GatedLayer(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one linear layer."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, width: int) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self._width = width
        self._loop = loop("silu_mul")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.of_rows(hidden.reshape(-1, hidden.shape[-1])).view(hidden.shape)

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to the same."""
        gate_up = self.gate_up.forward(rows)
        product = gate_up.new_empty(len(rows), self._width)
        self._loop(bits(gate_up), bits(product))
        output: torch.Tensor = self.down.forward(product)
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
        return self.of_rows(hidden_states[0], position_embeddings, segments)[None], None

    def of_rows(
        self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], segments: Segments
    ) -> torch.Tensor:
        """`[total, hidden]` to the same."""
        qkv = self.qkv.forward(rows)
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
        output: torch.Tensor = self.output.forward(attended)
        return output


class CompiledLayer(nn.Module):
    """A whole layer of norm, attention, norm and gated layer, each added to what comes in. Calls as little as can be:
    for one token, what is between the linear layers takes longer in Python than in the loops."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm: RmsNorm = layer.input_layernorm
        self.self_attn: PackedAttention = layer.self_attn
        self.post_attention_layernorm: RmsNorm = layer.post_attention_layernorm
        self.mlp: GatedLayer = layer.mlp

    def forward(
        self,
        hidden: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
        **_: object,
    ) -> torch.Tensor:
        rows = hidden[0]
        attended = self.self_attn.of_rows(self.input_layernorm.forward(rows), position_embeddings, segments)
        rows, normed = self.post_attention_layernorm.of_sum(rows, attended)
        return rows.add_(self.mlp.of_rows(normed))[None]


def _norm(module: nn.Module, name: str) -> RmsNorm | None:
    norm = getattr(module, name, None)
    assert norm is None or isinstance(norm, RmsNorm)
    return norm
