"""Linear layers of one input, multiplied as one: a step reads its input once, and calls one kernel for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# Siblings that every architecture calls with the same tensor, one after the other.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Group(nn.Module):
    """The linear layer of all parts, and what it has last made for those that have not asked yet."""

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.linear = linear
        self._sizes = list(sizes)
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def part(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        output = self._outputs[index] if self._input is hidden else None
        if output is None:
            outputs = torch.split(self.linear(hidden), self._sizes, dim=-1)
            self._input, self._outputs = hidden, list(outputs)
            output = outputs[index]
        self._outputs[index] = None
        if all(left is None for left in self._outputs):
            # Held for the next step, they would take memory that others count on.
            self._input, self._outputs = None, []
        return output


class FusedPart(nn.Module):
    """One of the layers that were fused, in its place in the model."""

    def __init__(self, group: _Group, index: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.group = group
        self.in_features = in_features
        self.out_features = out_features
        self._index = index

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.group.part(self._index, hidden)


def fused(linear: nn.Module, in_features: int, sizes: Sequence[int]) -> list[FusedPart]:
    """Parts with so many outputs each of a linear layer that has all of these outputs, in order."""
    group = _Group(linear, sizes)
    return [FusedPart(group, index, in_features, size) for index, size in enumerate(sizes)]


def groups_in(module: nn.Module) -> list[tuple[str, ...]]:
    """Names of children that can be fused: linear layers of one input, with biases or without, none missing."""
    found: list[tuple[str, ...]] = []
    for names in GROUPS:
        children: list[Any] = [getattr(module, name, None) for name in names]
        if all(isinstance(child, nn.Linear) for child in children):
            alike = {(child.in_features, child.bias is None) for child in children}
            if len(alike) == 1:
                found.append(names)
    return found
