"""Norms, gated layers and attention of known architectures, computed by compiled loops.

What they compute is what transformers' modules compute in bfloat16, rounding included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from services.node.engine.attention import attend_packed
from services.node.engine.cpu.compiled import Bits, attend_loop, bits, loop
from services.node.engine.fused import FusedPart
from services.node.engine.segments import Segments

# More are those of a prompt, and allocating memory for them takes no time beside them.
_SCRATCH_ROWS = 32


class RmsNorm(nn.Module):
    """Of the last dimension."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = np.float32(epsilon)
        self.bits = bits(weight.detach())
        self._loop = loop("rms_norm")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        output = torch.empty_like(rows)
        self._loop(bits(rows), self.bits, self.epsilon, bits(output))
        return output.view(hidden.shape)


class GatedLayer(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one linear layer."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, width: int) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.width = width
        self._loop = loop("silu_mul")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(hidden.reshape(-1, hidden.shape[-1]))
        product = gate_up.new_empty(len(gate_up), self.width)
        self._loop(bits(gate_up), bits(product))
        output: torch.Tensor = self.down(product)
        return output.view(hidden.shape)


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
        self.scaling = float(module.scaling)
        self.rotates = bool(getattr(module, "use_rope", True))
        # Compiled now, and not in the first step.
        attend_loop(self.head_dim, self.num_heads // self.kv_heads)
        self._rotate, self._norm = loop("rotate"), loop("norm_heads")

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        qkv = self.qkv(hidden_states[0])
        return self.output(self.of_heads(qkv, position_embeddings, segments)[None]), None

    def of_heads(
        self,
        qkv: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the linear layer makes `[total, (heads + 2 * kv_heads) * head_dim]` to what the next one takes
        `[total, heads * head_dim]`, in `output` if that is given."""
        heads = bits(qkv)
        first = 0
        for norm, count in zip(self.norms, (self.num_heads, self.kv_heads), strict=False):
            self._norm(heads, first, count, norm.bits, norm.epsilon)
            first += count
        if self.rotates:
            self._rotate(heads, self.num_heads + self.kv_heads, *segments.rotation(position_embeddings))
        return attend_packed(
            self.layer_idx, qkv, self.num_heads, self.kv_heads, self.scaling, self.window, segments, output
        )


class Scratch:
    """Memory for what is made and used up within one layer, the same for all layers that one thread runs."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], torch.Tensor] = {}
        self._parts: dict[tuple[str, int, int], tuple[torch.Tensor, Bits]] = {}

    def take(self, name: str, rows: int, width: int) -> tuple[torch.Tensor, Bits]:
        """`[rows, width]` for this use, with anything in it."""
        if rows > _SCRATCH_ROWS:
            tensor = torch.empty(rows, width, dtype=torch.bfloat16)
            return tensor, bits(tensor)
        part = self._parts.get((name, rows, width))
        if part is None:
            empty = torch.empty(_SCRATCH_ROWS, width, dtype=torch.bfloat16)
            tensor = self._all.setdefault((name, width), empty)[:rows]
            part = self._parts[name, rows, width] = tensor, bits(tensor)
        return part


class CompiledLayer(nn.Module):
    """A whole layer of norm, attention, norm and gated layer, each added to what comes in.

    It calls as little as can be: for one token, what Python does between the linear layers takes longer than the loops.
    """

    def __init__(self, layer: Any, scratch: Scratch) -> None:
        super().__init__()
        self.input_layernorm: RmsNorm = layer.input_layernorm
        self.self_attn: PackedAttention = layer.self_attn
        self.post_attention_layernorm: RmsNorm = layer.post_attention_layernorm
        self.mlp: GatedLayer = layer.mlp
        self._scratch = scratch
        self._rms_norm, self._add_rms_norm, self._silu_mul = loop("rms_norm"), loop("add_rms_norm"), loop("silu_mul")
        # Bound once: torch looks for a part of a module in three places, and for hooks before it calls it.
        self._norms = (self.input_layernorm.bits, self.post_attention_layernorm.bits)
        self._epsilons = (self.input_layernorm.epsilon, self.post_attention_layernorm.epsilon)
        self._qkv, self._output = self.self_attn.qkv.forward, self.self_attn.output.forward
        self._attend, self._attended_width = self.self_attn.of_heads, self.self_attn.num_heads * self.self_attn.head_dim
        self._gate_up, self._down, self._width = self.mlp.gate_up.forward, self.mlp.down.forward, self.mlp.width

    def forward(
        self,
        hidden: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        segments: Segments,
        **_: object,
    ) -> torch.Tensor:
        rows = hidden[0]
        count, width = rows.shape
        row_bits = bits(rows)
        normed, normed_bits = self._scratch.take("normed", count, width)
        self._rms_norm(row_bits, self._norms[0], self._epsilons[0], normed_bits)
        attended, _attended_bits = self._scratch.take("attended", count, self._attended_width)
        more = self._output(self._attend(self._qkv(normed), position_embeddings, segments, attended))
        # What comes out is handed on, and so has memory of its own.
        total = torch.empty_like(rows)
        self._add_rms_norm(row_bits, bits(more), self._norms[1], self._epsilons[1], bits(total), normed_bits)
        product, product_bits = self._scratch.take("product", count, self._width)
        self._silu_mul(bits(self._gate_up(normed)), product_bits)
        return total.add_(self._down(product))[None]


def _norm(module: nn.Module, name: str) -> RmsNorm | None:
    norm = getattr(module, name, None)
    assert norm is None or isinstance(norm, RmsNorm)
    return norm
