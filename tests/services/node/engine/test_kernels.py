"""INT8 linear layers and LM heads on a CPU against exact arithmetic, at all sizes that take another path."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.functional import linear

from meshnet.model import Quantization
from services.node.engine import kernels
from services.node.engine.cpu import tiles
from services.node.engine.executor import TorchExecutor
from services.node.engine.int8_linear import Int8Linear
from services.node.engine.kernels import TiedHead, padded
from services.node.engine.linear import held_bytes, make_linear

CPU = torch.device("cpu")
# Kernels for a single row round otherwise, where there are no matrix units.
ALONE = 1 if tiles.are_available() else 2


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Of the kernel's blocks, of none, and one for which it would read beyond the weights.
@pytest.mark.parametrize(("rows", "columns"), [(48, 96), (33, 70), (199, 64), (40, 32), (1, 7)])
def test_int8_layers_multiply_what_bitsandbytes_rounded(rows: int, columns: int) -> None:
    weight, bias = randn(rows, columns), randn(rows, seed=1)
    layer = make_linear(weight, bias, Quantization.INT8, CPU)
    assert isinstance(layer, Int8Linear)
    assert held_bytes(layer) == rows * columns + 4 * rows + 2 * rows
    rounded = layer.weight.float() * layer.scales[:, None]
    assert (rounded - weight.float()).abs().max() <= layer.scales.max()
    for tokens in (1, 4, 16, 17, 130):
        hidden = randn(1, tokens, columns, seed=tokens)
        output = layer(hidden)
        assert output.shape == (1, tokens, rows)
        assert output.dtype is torch.bfloat16
        torch.testing.assert_close(output.float(), linear(hidden.float(), rounded, bias.float()), rtol=0.01, atol=0.05)


def test_a_row_of_zeros_is_zeros() -> None:
    layer = make_linear(torch.zeros(32, 64).bfloat16(), None, Quantization.INT8, CPU)
    assert not layer(randn(1, 3, 64)).any()


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 64, 65, 130])
def test_a_tied_head_multiplies_like_any_linear_layer(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = randn(199, 64), randn(rows, 64, seed=1)
    monkeypatch.setattr(kernels, "HEAD_PIECE_VALUES", 1000)
    logits = TiedHead(weight)(hidden)
    assert logits.shape == (rows, 199)
    torch.testing.assert_close(logits, linear(hidden, weight), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("tokens", "filled"), [(1, 1 if tiles.are_available() else 2), (15, 15), (16, 16), (17, 32), (128, 128), (130, 144)]
)
def test_few_row_counts_occur(tokens: int, filled: int) -> None:
    hidden = randn(1, tokens, 8)
    rows = padded(hidden)
    assert rows.shape == (1, filled, 8)
    assert rows[:, :tokens].equal(hidden)
    assert not rows[:, tokens:].any()


def test_an_executor_bounds_the_kernels_that_are_kept() -> None:
    TorchExecutor({})
    assert int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) <= kernels.NUM_KERNELS
