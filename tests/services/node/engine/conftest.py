"""What the tests of the engine share."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshnet.model import Quantization
from services.node.engine.executor import TorchExecutor
from tests.oracle import unsharded
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
def smollm2_float32(smollm2_gguf: Path) -> Reference:
    """The unsharded SmolLM2-135M in float32. Many seconds to load; not to be changed."""
    return Reference(smollm2_gguf, torch.float32)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_float32: Reference) -> Reference:
    """The same in bfloat16."""
    return unsharded(smollm2_float32, Quantization.BFLOAT16)


@pytest.fixture(autouse=True)
def _every_block_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does to an executor, afterwards no block of its KV caches is lost or given out twice."""
    made: weakref.WeakSet[TorchExecutor] = weakref.WeakSet()
    begin = TorchExecutor.__init__

    def remember(executor: TorchExecutor, *arguments: Any, **options: Any) -> None:
        begin(executor, *arguments, **options)
        made.add(executor)

    monkeypatch.setattr(TorchExecutor, "__init__", remember)
    yield
    for executor in made:
        executor.check_integrity()
