"""Nodes join, leave and refill: real processes, real weights of a tiny model."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshnet.topology import Topology
from tests.e2e.commands import grpcurl
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import KV_TOKENS, NUM_LAYERS, room_for, save_tiny_llama
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "tiny"
ROOM_FOR_THREE = room_for(3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def mesh(weights: Path) -> Iterator[Mesh]:
    nodes = [NodeSpec("a", ROOM_FOR_THREE, tracker_node=True), NodeSpec("b", ROOM_FOR_THREE)]
    with running_mesh([f"{MODEL}={weights}"], nodes) as running:
        yield running


def replicas(topology: Topology) -> list[int]:
    """Number of nodes that serve each layer."""
    return [sum(layer in node.layers(MODEL) for node in topology.nodes.values()) for layer in range(NUM_LAYERS)]


def test_deploy_join_leave_and_refill(mesh: Mesh, weights: Path) -> None:
    reference = Reference(weights)
    draw = random.Random(5)
    prompt = [draw.randrange(512) for _ in range(200)]

    # Nothing is served until grpcurl deploys the model.
    assert mesh.topology().models == {}
    order = {"model_id": MODEL, "kv_tokens": KV_TOKENS}
    answer = json.loads(grpcurl(mesh.tracker_address, "meshnet.v1.Admin/DeployModel", data=order))
    assert len(answer["directives"]) == 2
    mesh.wait_until_complete(MODEL)
    assert mesh.layers(MODEL) == {"a": ["0-3"], "b": ["3-6"]}
    reference.check(prompt, mesh.generate(MODEL, prompt, 16))

    # A third and a fourth node join: they are registered and hold what is held already, as redundancy.
    mesh.start_nodes([NodeSpec("c", ROOM_FOR_THREE), NodeSpec("d", ROOM_FOR_THREE)])
    topology = mesh.wait_for(lambda t: min(replicas(t)) >= 2, "every layer has two replicas")
    assert set(topology.nodes) == {"a", "b", "c", "d"}

    # One that holds layers stops cleanly: it is gone at once, and routes avoid it.
    mesh.stop_node("b")
    topology = mesh.topology()
    assert "b" not in topology.nodes
    assert topology.coverage(MODEL).complete
    reference.check(prompt, mesh.generate(MODEL, prompt, 16, node_id="a"))

    # The other one with those layers stops too: the last node gives up its replica of the others to refill the gap.
    (second,) = [node_id for node_id in ("c", "d") if 3 in topology.nodes[node_id].layers(MODEL)]
    mesh.stop_node(second)
    mesh.wait_until_complete(MODEL)
    (last,) = set(mesh.topology().nodes) - {"a"}
    assert mesh.layers(MODEL) == {"a": ["0-3"], last: ["3-6"]}
    reference.check(prompt, mesh.generate(MODEL, prompt, 16, node_id="a"))
    mesh.wait_until_idle()


def test_a_node_with_other_weights_of_the_model_is_told_so_and_gets_no_layers(weights: Path, tmp_path: Path) -> None:
    """Its config, names and shapes are the same: a fine-tune, say."""
    other = save_tiny_llama(tmp_path / "other", seed=1)
    with running_mesh([f"{MODEL}={weights}"], [NodeSpec("a", "64MB", tracker_node=True)], deploy=[MODEL]) as mesh:
        mesh.models = [f"{MODEL}={other}"]
        mesh.start_nodes([NodeSpec("x", "64MB", options=("--no-fetch",))])
        wait_until(lambda: "another revision than the mesh serves" in mesh.nodes["x"].output(), 60, "x is told")
        mesh.models = [f"{MODEL}={weights}"]
        mesh.start_nodes([NodeSpec("b", "64MB")])
        # The redundancy that x could have been goes to b.
        topology = mesh.wait_for(lambda t: min(replicas(t)) >= 2, "every layer has two replicas")
        assert topology.nodes["x"].shards == ()
        assert mesh.layers(MODEL) == {"a": ["0-6"], "b": ["0-6"]}
        prompt = [7, 100, 300]
        Reference(weights).check(prompt, mesh.generate(MODEL, prompt, 8))
