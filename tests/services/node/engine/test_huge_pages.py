"""Weights in large pages: which bytes, and that nothing changes but their pages."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from services.node.engine import huge_pages
from services.node.engine.linear import PackedLinear

MB = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1))
def test_ranges_side_by_side_become_one(parts: list[tuple[int, int]]) -> None:
    ranges = [(begin * MB, (begin + size) * MB) for begin, size in parts]
    found = huge_pages.merged(ranges)
    assert {b for begin, end in found for b in range(begin, end, MB)} == {
        b for begin, end in ranges for b in range(begin, end, MB)
    }
    assert all(left[1] < right[0] for left, right in pairwise(found))


def test_small_gaps_are_of_no_account() -> None:
    assert huge_pages.merged([(0, 4096), (4112, 9000), (200000, 200001)]) == [(0, 9000), (200000, 200001)]


def test_weights_are_the_same_afterwards() -> None:
    weight = torch.randn(3000, 2000, generator=torch.Generator().manual_seed(0)).bfloat16()
    layers = [PackedLinear(weight, None) if PackedLinear.is_available(weight.device) else nn.Identity()]
    plain = nn.Linear(2000, 3000, bias=False).bfloat16()
    plain.weight.data = weight.clone()
    hidden = torch.randn(2, 2000, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = [layer(hidden) for layer in (*layers, plain)]
    moved = huge_pages.use_for([*layers, plain])
    assert 0 <= moved <= 2 * weight.nbytes + 4 * MB
    assert plain.weight.equal(weight)
    assert all(layer(hidden).equal(output) for layer, output in zip((*layers, plain), before, strict=True))


def test_memory_not_yet_touched_may_be_of_any_size() -> None:
    for size in (0, 1, 5 * MB):
        memory = torch.empty(size, dtype=torch.uint8)
        huge_pages.use_when_touched(memory)
        assert not memory.zero_().any()
