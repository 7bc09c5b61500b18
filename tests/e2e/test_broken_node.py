"""A node whose files are damaged where nobody looks computes nonsense: it is found, and no client hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.node.files.weight_samples import BLOCK_BYTES
from tests.e2e.admin import Admin, is_load
from tests.e2e.mesh import NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, save_tiny_llama
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "tiny"
# As `room_for`, for layers of 17.2 MB.
ROOM_FOR_TWO = "51.5MB"


def damaged(weights: Path, folder: Path) -> Path:
    """A copy in which each layer has an infinite weight, and nothing of it is seen at a start."""
    save_tiny_llama(folder, intermediate_size=1024)
    tensors = load_file(weights / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensor.view(-1)[BLOCK_BYTES] = float("inf")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_node_that_computes_nonsense_is_found_and_serves_no_more(tmp_path: Path) -> None:
    weights = save_tiny_llama(tmp_path / "good", intermediate_size=1024)
    bad = damaged(weights, tmp_path / "damaged")
    reference = Reference(weights)
    nodes = [NodeSpec("a", ROOM_FOR_TWO, tracker_node=True), NodeSpec("b", ROOM_FOR_TWO), NodeSpec("c", ROOM_FOR_TWO)]
    with running_mesh([f"{MODEL}={weights}"], nodes, kv_tokens=KV_TOKENS, tracker_options=("--deploy", MODEL)) as mesh:
        mesh.wait_until_complete(MODEL)
        mesh.start_nodes([NodeSpec("bad", ROOM_FOR_TWO, models=(f"{MODEL}={bad}",))])
        mesh.wait_for(lambda t: "bad" in t.nodes and bool(t.nodes["bad"].layers(MODEL)), "it serves a replica")
        admin = Admin(mesh)

        def failures() -> list[str]:
            for index in range(4):
                prompt = [index + 1, 2, 3]
                reference.check(prompt, mesh.generate(MODEL, prompt, 8))
            return [d["failure"] for d in admin.directives() if d["node_id"] == "bad" and is_load(d) and "failure" in d]

        wait_until(failures, 60, "it is not given layers any more", mesh.logs)
        assert "computed what is not finite" in failures()[0]
        assert not admin.node("bad").get("shards")
        mesh.wait_until_idle()
