"""Layers with parts that compiled loops compute, of each architecture: as near to float32 as without them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from meshnet.model import Quantization
from meshnet.model_files import ModelFiles
from services.node.engine import attention, loading
from services.node.engine.cpu.modules import CompiledLayer, GatedLayer, PackedAttention, RmsNorm
from services.node.files.manifest import read_manifest
from tests.services.node.engine.models import TINY, load, mesh, prompt_of, save_model, steady

# Kernels differ in the order of their sums; what is rounded wrongly is off by hundreds of times this.
_ALLOWED = 1.3
PROMPTS = {
    session: prompt_of(length, seed) for seed, (session, length) in enumerate({"a": 41, "b": 23, "c": 9}.items())
}


@torch.inference_mode()
def unsharded(files: ModelFiles) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
    return {session: model(torch.tensor([ids]), use_cache=False).logits[0] for session, ids in PROMPTS.items()}


def logits(files: ModelFiles) -> dict[str, torch.Tensor]:
    """All sessions together: a chunk of several rows each, then a chunk too short for a matrix, then token by token."""
    rows: dict[str, list[torch.Tensor]] = {session: [] for session in PROMPTS}
    bounds = [0, 6, 9, *range(10, max(map(len, PROMPTS.values())) + 1)]
    with mesh(files) as shards:
        for start, end in pairwise(bounds):
            hidden = shards.rows({s: ids[start:end] for s, ids in PROMPTS.items() if ids[start:end]})
            for session, row in hidden.items():
                rows[session].append(shards.logits(row).float())
    return {session: torch.cat(parts) for session, parts in rows.items()}


def error(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return sum(float((seen[session] - wanted[session]).abs().mean()) for session in wanted)


@pytest.mark.parametrize("kind", sorted(TINY))
def test_loops_are_as_near_to_float32_as_torch(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = save_model(tmp_path, steady(TINY[kind]))
    wanted = unsharded(files)
    looped = error(logits(files), wanted)
    monkeypatch.setattr(attention, "_have_loops", lambda *_: False)
    monkeypatch.setattr(loading, "with_compiled_parts", lambda module, *_: module)
    plain = error(logits(files), wanted)
    assert looped <= _ALLOWED * plain


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [
        ("llama", (CompiledLayer, RmsNorm, GatedLayer, PackedAttention)),
        ("qwen3", (CompiledLayer, RmsNorm, GatedLayer, PackedAttention)),
        ("smollm3", (CompiledLayer, RmsNorm, GatedLayer, PackedAttention)),
        ("mistral-window", (CompiledLayer, RmsNorm, GatedLayer, PackedAttention)),
        ("mixtral", (RmsNorm, PackedAttention)),
        ("olmo", (GatedLayer,)),
        ("gpt2", ()),
    ],
)
def test_known_parts_are_replaced(kind: str, replaced: tuple[type[nn.Module], ...], tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY[kind])
    layers = load(files, read_manifest(files).all_layers, Quantization.BFLOAT16).layers
    found = {type(part) for layer in layers.values() for part in layer.module.modules()}
    assert found & {CompiledLayer, RmsNorm, GatedLayer, PackedAttention} == set(replaced)
