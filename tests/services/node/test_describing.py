"""A model of which only the config is here weighs what the model itself does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshnet.errors import BadFiles, LoadFailed
from services.node.describing import describe_config
from services.node.files.manifest import read_manifest
from tests.services.node.engine.models import MODEL, TINY, save_model


@pytest.mark.parametrize("name", TINY)
def test_a_config_alone_says_what_the_weights_would_take(name: str, tmp_path: Path) -> None:
    files = save_model(tmp_path / "model", TINY[name])
    real = read_manifest(files)
    assert describe_config(MODEL, files.path / "config.json") == replace(
        real, revision=describe_config(MODEL, files.path / "config.json").revision
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "names no model_type"),
        ('{"hidden_size": 64}', "names no model_type"),
        ('{"model_type": "mamba"}', "state-space"),
    ],
)
def test_what_is_no_config_is_refused_with_a_reason(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadFailed, match=reason):
        describe_config(MODEL, tmp_path / "config.json")


def test_a_config_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFiles, match=r"config\.json cannot be read"):
        describe_config(MODEL, tmp_path / "config.json")
