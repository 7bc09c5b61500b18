"""Shards that compute in float16, as on GPUs without bfloat16. What they send is bfloat16 all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshnet.model import Quantization
from services.node.engine.precision import converted, half_dtype
from tests.parity import Reference
from tests.services.node.engine.models import TINY, mesh, prompt_of, save_model, splits_of, steady
from tests.services.node.engine.rounded import likeness, requantized


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("ends", [(), (1, 3)])
def test_logits_are_those_of_the_unsharded_model(tmp_path: Path, model: str, ends: tuple[int, ...]) -> None:
    files, prompt = save_model(tmp_path, steady(TINY[model])), prompt_of(40)
    with mesh(files, splits_of(4, *ends), half=torch.float16) as shards:
        executor, layers = shards.shards[0]
        assert executor.entry(files.model_id).dtype is torch.float16
        first = executor._models[files.model_id]._layers[layers.start]
        assert {parameter.dtype for parameter in first.module.parameters()} == {torch.float16}
        for start in (0, 16, 32):
            row = shards.step({"a": prompt[start : start + 16]})["a"]
        alike = likeness(row, Reference(files.path).logits(prompt)[-1], executor.entry(files.model_id))
    assert alike > 0.9999


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.NF4])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_quantized_shards_compute_in_float16_too(tmp_path: Path, quantization: Quantization) -> None:
    files, prompt = save_model(tmp_path, TINY["llama"]), prompt_of(40)
    with mesh(files, quantization=quantization, half=torch.float16) as shards:
        row = shards.step({"a": prompt})["a"]
        wanted = requantized(Reference(files.path), quantization).logits(prompt)[-1]
        assert likeness(row, wanted, shards.shards[0][0].entry(files.model_id)) > 0.999


def test_what_float16_cannot_hold_stays_finite() -> None:
    values = torch.tensor([1e30, -1e30, 65504.0, 65536.0, 1.5, float("inf"), -float("inf")], dtype=torch.bfloat16)
    half = converted(values, torch.float16)
    assert half.tolist() == [65280.0, -65280.0, 65280.0, 65280.0, 1.5, 65280.0, -65280.0]
    assert half.to(torch.bfloat16).to(torch.float16).equal(half)
    assert converted(values, torch.bfloat16).equal(values)


def test_a_cpu_computes_in_bfloat16() -> None:
    assert half_dtype(torch.device("cpu")) is torch.bfloat16


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_what_a_gpu_computes_in_follows_from_its_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert half_dtype(torch.device("cuda")) is dtype
