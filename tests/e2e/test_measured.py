"""What a node says of itself: measured, told to the tracker, shown, and known again after a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from meshnet.model import Quantization
from tests.e2e.commands import meshnet
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import save_tiny_llama
from tests.processes import wait_until

MODEL = "tiny"
PREFERRED, FALLBACK = Quantization.BFLOAT16, Quantization.INT8


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> NodeSpec:
    return NodeSpec(
        "a",
        "1000TB",
        quantization=f"{PREFERRED},{FALLBACK}",
        options=("--site", "kitchen", "--cache-dir", str(tmp_path_factory.mktemp("cache"))),
    )


@pytest.fixture(scope="module")
def mesh(spec: NodeSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    weights = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    with running_mesh([f"{MODEL}={weights}"], [spec], deploy=[MODEL]) as running:
        yield running


def test_a_node_measures_itself_and_knows_it_when_it_is_started_again(mesh: Mesh, spec: NodeSpec) -> None:
    wait_until(lambda: len(mesh.health("a")["speeds"]) == 2, 60, "both quantizations are measured", mesh.logs)
    assert mesh.health("a")["workspace_bytes"] > 0
    assert mesh.health("a")["memory_free_bytes"] % (16 << 20) == 0
    mesh.stop_node("a")
    mesh.start_nodes([spec])
    node = mesh.wait_for(lambda topology: "a" in topology.nodes, "the node is back").nodes["a"]
    # It registered with them: nothing had to be measured.
    assert [speed.quantization for speed in node.speeds] == [PREFERRED, FALLBACK]
    assert node.site == "kitchen"
    assert node.quantizations == (PREFERRED, FALLBACK)
    assert "measuring layer" not in mesh.nodes["a"].output()


def test_lending_more_than_is_free_is_said_with_both_numbers(mesh: Mesh) -> None:
    said = mesh.nodes["a"].wait_for(r"lends 1000.0 TB, but only (\S+ [kMGT]?B) of the memory of cpu are free now")
    assert said[1] != "0 B"


def test_status_shows_it(mesh: Mesh) -> None:
    mesh.wait_until_complete(MODEL)
    mesh.wait_for(lambda topology: any(probe.ready for probe in topology.probes(MODEL)), "a route is ready")
    shown = meshnet("status", "--tracker", mesh.tracker_address)
    assert "bfloat16+int8" in shown
    assert "route ready  a:0-6" in shown
    assert max(map(len, shown.splitlines())) <= 80
    status = json.loads(meshnet("status", "--json", "--tracker", mesh.tracker_address))
    assert [node["node_id"] for node in status["nodes"]] == ["a"]
    assert status["models"][0]["complete"]
    assert [route["ready"] for route in status["models"][0]["routes"]] == [True]
