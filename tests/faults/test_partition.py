"""Partitions, on hosts of their own, and a mesh that meets one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.links.namespaces import ISOLATED
from tests.faults.partition import missing_for_partitions
from tests.processes import ROOT

pytestmark = pytest.mark.skipif(bool(missing_for_partitions()), reason=missing_for_partitions())


def isolated(module: str, *arguments: str, timeout: float) -> None:
    """Runs a module in a network namespace of its own."""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", module, *arguments],
        cwd=ROOT, env={**os.environ, ISOLATED: "1"}, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def test_one_way_and_both_ways_and_some_loss() -> None:
    isolated("tests.faults.parted_hosts", timeout=60)


@pytest.mark.slow
def test_a_mesh_serves_on_while_two_hops_are_parted(tmp_path: Path) -> None:
    isolated("tests.faults.parted_mesh", str(tmp_path), timeout=300)
