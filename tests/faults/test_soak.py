"""A short soak, `make slow`; `make soak` takes half an hour."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.soak import run
from tests.faults.usage import Sample, bytes_a_minute

# Of the faults.
SOAK_SECONDS = float(os.environ.get("MESHNET_SOAK_SECONDS", "180"))


@pytest.mark.slow
def test_streams_that_never_end_on_a_mesh_where_something_always_fails(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    failures = run(SOAK_SECONDS, seed, tmp_path, print)
    assert not failures, "\n".join([f"seed {seed}", *failures])


def test_growth_is_the_slope_through_all_samples() -> None:
    assert bytes_a_minute([Sample(60.0 * i, 1000 + 50 * i, 1) for i in range(5)]) == 50.0
    assert bytes_a_minute([Sample(60.0 * i, 1000, 1) for i in range(5)]) == 0.0
    assert bytes_a_minute([Sample(0.0, 1000, 1)]) == 0.0
