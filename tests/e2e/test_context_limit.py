"""A mesh that was told to serve shorter sequences than its model was made for."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.e2e.commands import meshnet
from tests.e2e.mesh import NodeSpec, running_mesh
from tests.e2e.tiny import save_tiny_llama

LIMIT = 64


def test_entry_nodes_hold_to_the_limit_of_the_deployment(tmp_path: Path) -> None:
    model = f"tiny={save_tiny_llama(tmp_path / 'tiny')}"
    with running_mesh([model], [NodeSpec("a", "40MB")]) as mesh:
        limits = ("--context", str(LIMIT), "--sessions", "4", "--tracker", mesh.tracker_address)
        assert "nothing to do" not in meshnet("plan", "--deploy", "tiny", *limits)
        meshnet("deploy", "tiny", *limits)
        mesh.wait_until_complete("tiny")
        prompt = [1] * (LIMIT - 2)
        assert len(mesh.generate("tiny", prompt, 2)) == 2
        with pytest.raises(grpc.RpcError, match=f"the limit is {LIMIT}"):
            mesh.generate("tiny", prompt, 3)
        mesh.wait_until_idle()
