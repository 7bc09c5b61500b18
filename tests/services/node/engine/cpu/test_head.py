"""The greedy choice in a compiled loop is that of the logits."""

from __future__ import annotations

import pytest
import torch

from services.node.engine.cpu import head, tiles
from services.node.engine.kernels import TiedHead

pytestmark = pytest.mark.skipif(not tiles.are_available(), reason="this processor has no matrix units")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def make_head(monkeypatch: pytest.MonkeyPatch) -> type[TiedHead]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return TiedHead


@pytest.mark.parametrize("rows", [1, 2, 7, head.MAX_ROWS])
def test_it_is_the_first_of_the_largest_logits(make_head: type[TiedHead], rows: int) -> None:
    weight = randn(4096, 96)
    # Each is there four times over.
    weight[1024:] = weight[:1024].repeat(3, 1)
    tied, hidden = make_head(weight), randn(rows, 96, seed=1)
    found = tied.greedy(hidden)
    assert found is not None
    largest, tokens = tied(hidden).max(dim=-1)
    assert found[0].bfloat16().equal(largest)
    assert found[1].equal(tokens)
    assert (tokens < 1024).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_seen_and_is_that_rows_alone(make_head: type[TiedHead], bad: float) -> None:
    tied, hidden = make_head(randn(64, 96)), randn(3, 96, seed=1)
    hidden[1, 5] = bad
    found = tied.greedy(hidden)
    assert found is not None
    assert torch.isfinite(found[0]).tolist() == [True, False, True]


def test_other_sizes_take_the_logits(make_head: type[TiedHead]) -> None:
    assert make_head(randn(64, 96)).greedy(randn(head.MAX_ROWS + 1, 96)) is None
    assert make_head(randn(80, 96)).greedy(randn(1, 96)) is None
    assert make_head(randn(64, 80)).greedy(randn(1, 80)) is None
