"""A node whose memory or whose disk is full says so, and serves what it has."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.admin import Admin
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.faults.scarcity import (
    limited_memory,
    memory_group,
    missing_for_limited_memory,
    missing_for_oom_kills,
    missing_for_small_disks,
    small_disk,
)

MODEL = "tiny"
PROMPT = [5, 6, 7]
TAKE = "x = bytearray(256 << 20); print(len(x))"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.skipif(bool(missing_for_limited_memory()), reason=missing_for_limited_memory())
def test_allocations_fail_beyond_the_limit() -> None:
    command = [*limited_memory(128 << 20), sys.executable, "-c", TAKE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "MemoryError" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_oom_kills()), reason=missing_for_oom_kills())
def test_a_mesh_serves_on_when_the_kernel_kills_a_node_for_its_memory(weights: Path) -> None:
    with memory_group() as group:
        specs = [NodeSpec("a", room_for(6), tracker_node=True), NodeSpec("b", room_for(6), prefix=group.prefix)]
        with running_mesh([f"{MODEL}={weights}"], specs, kv_tokens=KV_TOKENS, deploy=[MODEL]) as mesh:
            mesh.wait_for(lambda t: all(len(node.layers(MODEL)) == 6 for node in t.nodes.values()), "both hold all")
            before = mesh.generate(MODEL, PROMPT, 20, node_id="a")
            group.limit(group.num_bytes + (64 << 20))
            # Something else on the machine wants more than there is, and the node is the larger of the two.
            taken = subprocess.run([*group.prefix, sys.executable, "-c", TAKE], check=True, capture_output=True)
            assert int(taken.stdout) == 256 << 20
            assert mesh.nodes["b"].process.wait(10) == -signal.SIGKILL
            mesh.kill_node("b")
            mesh.wait_for(lambda topology: topology.nodes.keys() == {"a"}, "the node is lost")
            assert mesh.generate(MODEL, PROMPT, 20, node_id="a") == before


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_small_disks()), reason=missing_for_small_disks())
def test_a_node_without_room_on_its_disk_fetches_nothing_and_the_others_serve(weights: Path, tmp_path: Path) -> None:
    source = NodeSpec("a", room_for(6), tracker_node=True)
    with (
        small_disk(tmp_path, 16 << 10),
        running_mesh([f"{MODEL}={weights}"], [source], kv_tokens=KV_TOKENS, deploy=[MODEL]) as mesh,
    ):
        before = mesh.generate(MODEL, PROMPT, 20)
        mesh.start_nodes([NodeSpec("b", room_for(6), options=("--cache-dir", str(tmp_path)), models=())])
        failed = mesh.nodes["b"].wait_for(r"LOAD_SHARD layers \S+ failed: (.*)", 60)
        assert "the disk of --cache-dir has" in failed[1]
        assert any(failed[1] in d.get("failure", "") for d in Admin(mesh).directives())
        assert mesh.generate(MODEL, PROMPT, 20) == before
        _takes_nothing_more(mesh)


def _takes_nothing_more(mesh: Mesh) -> None:
    Admin(mesh).settle()
    assert mesh.layers(MODEL).keys() == {"a"}
