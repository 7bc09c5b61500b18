"""The loop of a whole layer: its products are oneDNN's to the bit, its attention that of float32."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from services.node.engine import stretch
from services.node.engine.cpu import attend, layer, packed, tiles
from services.node.engine.cpu.compiled import bits
from services.node.engine.cpu.whole import WholeLayers
from services.node.engine.linear import PackedLinear
from tests.services.node.engine.models import VOCAB, mesh, prompt_of, save_model, steady

NO_BIAS = np.empty(0, np.uint16)

pytestmark = pytest.mark.skipif(not tiles.are_available(), reason="this processor has no matrix units")


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(576, 960), (1536, 576), (32, 32)])
def test_products_are_onednns_to_the_bit_whatever_is_beside_them(num_in: int, num_out: int, biased: bool) -> None:
    module = PackedLinear(randn(num_out, num_in), randn(num_out, seed=1) if biased else None)
    assert module.bits is not None
    bias = bits(module.bias) if module.bias is not None else NO_BIAS
    alone = torch.empty(1, num_out, dtype=torch.bfloat16)
    for count in (1, 2, 15, 16, 17, 31, layer.MAX_ROWS):
        rows = randn(count, num_in, seed=count)
        output = torch.empty(count, num_out, dtype=torch.bfloat16)
        layer.multiply(bits(rows), module.bits, bias, bits(output))
        assert output.equal(module(rows))
        torch.testing.assert_close(output, linear(rows, randn(num_out, num_in), module.bias), rtol=2**-7, atol=0.1)
        layer.multiply(bits(rows[-1:].clone()), module.bits, bias, bits(alone))
        assert alone[0].equal(output[-1])


def test_only_sizes_that_fill_tiles_are_multiplied_so() -> None:
    assert PackedLinear(randn(48, 64), None).bits is None
    assert PackedLinear(randn(64, 48), None).bits is None


def test_another_order_of_weights_is_seen() -> None:
    weight = randn(2048, 64)
    module = PackedLinear(weight, None)
    assert module.bits is not None
    module.bits[-2:] = module.bits[-2:][::-1].copy()
    assert packed.packed_bits(module.packed, weight) is None


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (16, 32), (4, 96), (2, 128)])
def test_attention_is_that_of_float32_and_each_rows_own(group: int, head_dim: int) -> None:
    kv_heads, room = 2, 1200
    keys, values = randn(kv_heads, room, head_dim), randn(kv_heads, room, head_dim, seed=1)
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 130, 513)
    begins = np.cumsum([3, *lengths[:-1]]).astype(np.int64)
    ends = begins + np.array(lengths)
    # What lies behind the tokens that a row sees is anything.
    for end in ends:
        if end not in begins:
            keys[:, end], values[:, end] = float("nan"), float("inf")
    keys[:, :3], values[:, ends[-1] :], keys[:, ends[-1] :] = float("nan"), float("nan"), float("inf")
    query = randn(len(lengths), (group + 2) * kv_heads * head_dim, seed=2)
    output = torch.empty(len(lengths), group * kv_heads * head_dim, dtype=torch.bfloat16)
    arguments = bits(keys), bits(values)
    attend.attend(bits(query), *arguments, begins, ends, np.float32(0.2), bits(output))
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        seen = slice(begin, end)
        asked = query[row, : group * kv_heads * head_dim].view(kv_heads, group, head_dim).float()
        wanted = scaled_dot_product_attention(asked, keys[:, seen].float(), values[:, seen].float(), scale=0.2)
        torch.testing.assert_close(output[row].float(), wanted.flatten(), rtol=2**-7, atol=2**-8)
        alone = torch.empty(1, output.shape[1], dtype=torch.bfloat16)
        one = slice(row, row + 1)
        attend.attend(bits(query[one]), *arguments, begins[one], ends[one], np.float32(0.2), bits(alone))
        assert alone[0].equal(output[row])


@pytest.mark.parametrize("group", [1, 3, 5, 16])
def test_rows_of_one_session_have_the_bits_that_each_has_alone(group: int) -> None:
    head_dim, kv_heads = 32, 2
    keys, values = randn(kv_heads, 300, head_dim), randn(kv_heads, 300, head_dim, seed=1)
    # Nineteen rows of one session, three of another, one of a third.
    begins = np.array([10] * 19 + [200] * 3 + [250], np.int64)
    ends = np.array([*range(60, 79), 201, 202, 203, 290], np.int64)
    query = randn(len(begins), (group + 2) * kv_heads * head_dim, seed=2)
    output = torch.empty(len(begins), group * kv_heads * head_dim, dtype=torch.bfloat16)
    attend.attend(bits(query), bits(keys), bits(values), begins, ends, np.float32(0.2), bits(output))
    for row in range(len(begins)):
        one, alone = slice(row, row + 1), torch.empty(1, output.shape[1], dtype=torch.bfloat16)
        attend.attend(bits(query[one]), bits(keys), bits(values), begins[one], ends[one], np.float32(0.2), bits(alone))
        assert alone[0].equal(output[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_never_hidden(bad: float) -> None:
    rows, keys = randn(2, 96), randn(1, 8, 32)
    keys[0, 2, 5] = bad
    output = torch.empty(1, 32, dtype=torch.bfloat16)
    begins = np.array([0], np.int64)
    attend.attend(bits(rows[:1]), bits(keys), bits(keys), begins, begins + 8, np.float32(1), bits(output))
    assert not output.isfinite().all()
    module = PackedLinear(randn(64, 96), None)
    rows[1, 3] = bad
    products = torch.empty(2, 64, dtype=torch.bfloat16)
    layer.multiply(bits(rows), module.bits, NO_BIAS, bits(products))
    assert products[0].isfinite().all()
    assert not products[1].isfinite().any()


SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama-biased": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES},
    "smollm3": {"model_type": "smollm3", **SIZES, "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "mistral-window": {"model_type": "mistral", **SIZES, "sliding_window": 12},
}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_layers_are_the_same_as_part_by_part(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = save_model(tmp_path, steady(CONFIGS[kind]))
    prompts = {name: prompt_of(length, length) for name, length in {"a": 75, "b": 40, "c": 23}.items()}
    bounds = [0, 20, *range(21, 30), 33, *range(34, 75)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    used: list[int] = []
    run = WholeLayers.run

    def watched(self: Any, rows: torch.Tensor, *more: Any) -> torch.Tensor | None:
        done = run(self, rows, *more)
        used.append(len(rows) if done is not None else 0)
        return done

    monkeypatch.setattr(WholeLayers, "run", watched)

    def all_logits() -> torch.Tensor:
        with mesh(files) as shards:
            parts = []
            for start, end in pairwise(bounds):
                rows = shards.rows({name: ids[start:end] for name, ids in prompts.items() if ids[start:end]})
                parts += [shards.logits(row).float() for row in rows.values()]
        return torch.cat(parts)

    whole = all_logits()
    assert {1, 2, 3} <= set(used)
    monkeypatch.setattr(stretch, "sizes_of", lambda _: None)
    in_parts = all_logits()
    torch.testing.assert_close(whole, in_parts, rtol=0.05, atol=0.05)
    assert (whole == in_parts).float().mean() > 0.5
