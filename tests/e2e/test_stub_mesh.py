"""Many stub nodes: no weights, zeros of the right shape, never on a route with real ones."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.mesh import NodeSpec, running_mesh
from tests.e2e.tiny import NUM_LAYERS, save_tiny_llama

MODEL = "tiny"


def test_a_stub_mesh_answers_and_gives_way_to_real_nodes(tmp_path: Path) -> None:
    weights = save_tiny_llama(tmp_path / "tiny")
    stubs = [NodeSpec(f"stub-{index}", "17.1MB", stub=True, tracker_node=index == 0) for index in range(6)]
    with running_mesh([f"{MODEL}={weights}"], stubs, deploy=[MODEL]) as mesh:
        assert mesh.layers(MODEL) == {f"stub-{index}": [f"{index}-{index + 1}"] for index in range(NUM_LAYERS)}
        assert "STUB NODE" in mesh.nodes["stub-3"].output()
        assert mesh.health("stub-3")["stub"] is True
        assert mesh.generate(MODEL, list(range(300)), 5) == [0] * 5
        mesh.wait_until_idle()

        # A real node that has the files takes over: its answer is not zeros.
        mesh.start_nodes([NodeSpec("real", "40MB")])
        mesh.wait_for(
            lambda t: "real" in t.nodes and len(t.nodes["real"].layers(MODEL)) == NUM_LAYERS,
            "the real node serves all layers",
        )
        assert mesh.generate(MODEL, list(range(300)), 5, node_id="real") != [0] * 5
