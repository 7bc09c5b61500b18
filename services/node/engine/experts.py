"""Mixtures of experts whose experts are linear layers each, so that they load one by one and quantize as others do.

transformers stacks the experts of a layer in one tensor a projection, which no quantized kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

GATE_UP, DOWN = "gate_up_proj", "down_proj"

# (hidden, gate and up in one) -> what the down projection takes.
Gate = Callable[[torch.Tensor], torch.Tensor]


def are_stacked(module: nn.Module) -> bool:
    """Whether this is the stack of experts of a layer that this version can take apart."""
    parameters = dict(module.named_parameters(recurse=False))
    stacked = all(name in parameters and parameters[name].ndim == 3 for name in (GATE_UP, DOWN))
    return stacked and hasattr(module, "_apply_gate") and not getattr(module, "has_post_expert_norm", False)


class LinearExperts(nn.Module):
    """Stands in for a stack of experts. `gate` is the stack's own activation."""

    def __init__(self, gate_up: list[nn.Module], down: list[nn.Module], gate: Gate) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self._gate = gate

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` through the experts `chosen` `[tokens, top_k]`, summed with their `weights`."""
        output = torch.zeros_like(hidden)
        for expert in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == expert)
            part = self.down[expert](self._gate(self.gate_up[expert](hidden[rows])))
            part = part * weights[rows, places, None]
            output.index_add_(0, rows, part.to(output.dtype))
        return output
