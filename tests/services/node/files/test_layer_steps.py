"""What a step holds, from real configs and tensors of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.node.files.manifest import read_manifest
from tests.services.node.engine.models import TINY, WINDOW, save_model


# Four times the widest linear layer's outputs and three hidden states of 64.
@pytest.mark.parametrize(
    ("model", "widest"),
    [
        ("llama", [128] * 4),
        ("gpt2", [256] * 4),
        ("phi3", [128] * 4),
        ("mixtral", [128] * 4),
        ("qwen3_moe", [128] * 4),
        ("gpt_oss", [128] * 4),
    ],
)
def test_widths_are_those_of_one_expert_and_one_of_two_joined_projections(
    tmp_path: Path, model: str, widest: list[int]
) -> None:
    manifest = read_manifest(save_model(tmp_path, TINY[model]))
    assert [(step.values - 3 * 64) // 4 for step in manifest.steps] == widest


def test_scores_and_windows_are_known(tmp_path: Path) -> None:
    steps = read_manifest(save_model(tmp_path / "gpt_oss", TINY["gpt_oss"])).steps
    assert [step.score_heads for step in steps] == [4] * 4
    assert [step.window for step in steps] == [WINDOW, None] * 2
    assert {step.score_heads for step in read_manifest(save_model(tmp_path / "llama", TINY["llama"])).steps} == {0}
