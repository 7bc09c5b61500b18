"""What the tests of the engine share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity import Reference


@pytest.fixture(scope="session", autouse=True)
def _frozen_imports() -> Iterator[None]:
    """Shards that are dropped are collected at once. That would look through all that torch and transformers hold,
    which takes most of the time of these tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Reference:
    """The unsharded SmolLM2-135M in bfloat16. Seconds to load; not to be changed."""
    return Reference(smollm2_gguf)
