"""What the tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import Reference


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_gguf: Path) -> Reference:
    """The unsharded SmolLM2-135M in bfloat16. Seconds to load; not to be changed."""
    return Reference(smollm2_gguf)
