"""Compiled loops against torch's operations: the same bits where the order of sums does not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from services.node.engine.cpu.compiled import _attend_loop, _loop, bits

THREADS = [1, 2]


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (7, 33), (130, 64)])
def test_norms_are_those_of_the_models(rows: int, width: int, threads: int) -> None:
    hidden, module = randn(rows, width, scale=3), LlamaRMSNorm(width, 1e-5).bfloat16()
    module.weight.data = randn(width, seed=1)
    output = torch.empty_like(hidden)
    _loop("rms_norm", threads)(bits(hidden), bits(module.weight.detach()), np.float32(1e-5), bits(output))
    differing = (output != module(hidden)).sum()
    assert differing <= hidden.numel() // 200
    torch.testing.assert_close(output, module(hidden), rtol=2**-7, atol=0)


@pytest.mark.parametrize("threads", THREADS)
def test_what_is_added_is_rounded_before_it_is_normed(threads: int) -> None:
    hidden, more, weight = randn(5, 576, scale=3), randn(5, 576, seed=2), randn(576, seed=1)
    total, output, wanted = torch.empty_like(hidden), torch.empty_like(hidden), torch.empty_like(hidden)
    epsilon = np.float32(1e-5)
    _loop("add_rms_norm", threads)(bits(hidden), bits(more), bits(weight), epsilon, bits(total), bits(output))
    assert total.equal(hidden + more)
    _loop("rms_norm", threads)(bits(total), bits(weight), epsilon, bits(wanted))
    assert output.equal(wanted)


@pytest.mark.parametrize("threads", THREADS)
def test_heads_are_normed_where_they_lie(threads: int) -> None:
    heads, module = randn(5, 6 * 32, scale=3), LlamaRMSNorm(32, 1e-6).bfloat16()
    module.weight.data = randn(32, seed=1)
    wanted = heads.view(5, 6, 32).clone()
    wanted[:, 2:4] = module(wanted[:, 2:4])
    _loop("norm_heads", threads)(bits(heads), 2, 2, bits(module.weight.detach()), np.float32(1e-6))
    torch.testing.assert_close(heads.view(5, 6, 32), wanted, rtol=2**-7, atol=0)
    assert heads.view(5, 6, 32)[:, [0, 1, 4, 5]].equal(wanted[:, [0, 1, 4, 5]])


@pytest.mark.parametrize("threads", THREADS)
def test_gates_are_exact(threads: int) -> None:
    gate_up = randn(9, 2 * 700, scale=20)
    gate_up[0, :4] = torch.tensor([0.0, -0.0, 300.0, -300.0])
    output = torch.empty(9, 700, dtype=torch.bfloat16)
    _loop("silu_mul", threads)(bits(gate_up), bits(output))
    wanted = silu(gate_up[:, :700]) * gate_up[:, 700:]
    torch.testing.assert_close(output, wanted, rtol=2**-7, atol=1e-30)
    assert (output != wanted).sum() <= 9


@pytest.mark.parametrize("threads", THREADS)
def test_rotation_is_exact_and_leaves_values_alone(threads: int) -> None:
    heads, cos, sin = randn(6, (4 + 2 + 2) * 32), randn(6, 32, seed=1), randn(6, 32, seed=2)
    packed = heads.view(1, 6, 8, 32).transpose(1, 2)
    query, key = apply_rotary_pos_emb(packed[:, :4], packed[:, 4:6], cos[None], sin[None])
    wanted = torch.cat([query, key, packed[:, 6:]], dim=1).transpose(1, 2).reshape(6, -1)
    _loop("rotate", threads)(bits(heads), 6, bits(cos), bits(sin))
    assert heads.equal(wanted)


@pytest.mark.parametrize("threads", THREADS)
def test_keys_and_values_are_stored_where_they_belong(threads: int) -> None:
    heads = randn(3, (2 + 2 + 2) * 8)
    keys, values = torch.zeros(2, 2, 10, 8, dtype=torch.bfloat16)
    _loop("store", threads)(bits(heads), 2, bits(keys), bits(values), tokens(7, 0, 4))
    split = heads.view(3, 6, 8).transpose(0, 1)
    assert keys[:, [7, 0, 4]].equal(split[2:4])
    assert values[:, [7, 0, 4]].equal(split[4:6])
    assert not keys[:, [1, 2, 3, 5, 6, 8, 9]].any()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (4, 80), (7, 12)])
def test_attention_is_that_of_float32_and_each_rows_own(group: int, head_dim: int, threads: int) -> None:
    kv_heads, lengths = 2, (1, 5, 130)
    keys, values = randn(kv_heads, 200, head_dim), randn(kv_heads, 200, head_dim, seed=1)
    query = randn(4, (group + 2) * kv_heads * head_dim, seed=2)
    output = torch.zeros(4, group * kv_heads * head_dim, dtype=torch.bfloat16)
    rows, begins = tokens(0, 3, 1), tokens(9, 20, 60)
    loop = _attend_loop(head_dim, group, threads)
    loop(
        bits(query), bits(keys), bits(values), rows, begins, begins + tokens(*lengths), np.float32(0.2), bits(output)
    )  # fmt: skip
    assert not output[2].any()
    for row, begin, length in zip(rows, begins, lengths, strict=True):
        seen = slice(begin, begin + length)
        asked = query[row, : group * kv_heads * head_dim].view(kv_heads, group, head_dim).float()
        wanted = scaled_dot_product_attention(asked, keys[:, seen].float(), values[:, seen].float(), scale=0.2)
        torch.testing.assert_close(output[row].float(), wanted.flatten(), rtol=2**-7, atol=2**-9)
        alone = torch.zeros_like(output)
        loop(
            bits(query), bits(keys), bits(values), tokens(row), tokens(begin), tokens(begin + length),
            np.float32(0.2), bits(alone),
        )  # fmt: skip
        assert alone[row].equal(output[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_never_hidden(bad: float) -> None:
    hidden = randn(2, 64)
    hidden[1, 3] = bad
    output = torch.empty_like(hidden)
    _loop("rms_norm", 1)(bits(hidden), bits(torch.ones(64).bfloat16()), np.float32(1e-5), bits(output))
    assert output[0].isfinite().all()
    assert output[1].isnan().any()
    product = torch.empty(2, 32, dtype=torch.bfloat16)
    _loop("silu_mul", 1)(bits(hidden), bits(product))
    assert not product[1, 3].isfinite()
    keys = randn(1, 8, 64)
    keys[0, 2, 5] = bad
    attended = torch.empty(1, 64, dtype=torch.bfloat16)
    _attend_loop(64, 1, 1)(
        bits(hidden[:1]), bits(keys), bits(keys), tokens(0), tokens(0), tokens(8), np.float32(1), bits(attended)
    )
    assert not attended.isfinite().all()
