"""What all tests share."""

from __future__ import annotations

import os

# The hub is never asked: models are made here or come from an installed package.
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.smollm2 import smollm2_path

# The machines that run the tests are shared: how long an example takes says nothing.
settings.register_profile("meshnet", deadline=None)
settings.load_profile("meshnet")


@pytest.fixture(scope="session", autouse=True)
def _cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes that tests start keep what they measured here, not in the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHNET_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return smollm2_path()
