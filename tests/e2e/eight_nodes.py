"""Eight nodes of different size and quantization, and what the tests of them share."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc

from meshnet.model import Quantization
from meshnet.topology import Topology
from meshnet.v1 import admin_pb2, admin_pb2_grpc, tracker_pb2
from tests.e2e.admin import Admin, Told, is_load, layers_of
from tests.e2e.mesh import SETTLE_SECONDS, Mesh, NodeSpec
from tests.e2e.tiny import KV_TOKENS, VOCAB_SIZE, room_for
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "tiny"
NUM_LAYERS = 12
SPECS = {
    spec.node_id: spec
    for spec in (
        NodeSpec("a", room_for(3), "bfloat16", tracker_node=True),
        NodeSpec("b", room_for(2), "int8"),
        NodeSpec("c", room_for(3), "nf4"),
        NodeSpec("d", "84.13MB", "bfloat16,int8"),  # three in bfloat16, four in int8
        NodeSpec("e", room_for(2), "int8,nf4"),
        NodeSpec("f", room_for(3), "nf4"),
        NodeSpec("g", room_for(4), "bfloat16"),
        NodeSpec("h", room_for(5), "int8"),
    )
}
# Products of int8 depend in their last bits on what else is multiplied with them. With the weights of bfloat16 in the
# place of the quantized ones tokens are fifty steps off.
TOLERATED_STEPS = 16.0


class Nodes:
    """The eight nodes, each with files of its own."""

    def __init__(self, mesh: Mesh, weights: Path, folder: Path) -> None:
        self._mesh = mesh
        self._weights = weights
        self._folder = folder

    def ensure(self, node_ids: str) -> None:
        """Starts those that do not run, and waits until the tracker knows all."""
        specs = [SPECS[node_id] for node_id in node_ids if node_id not in self._mesh.nodes]
        for spec in specs:
            shutil.copytree(self._weights, self.files(spec.node_id), dirs_exist_ok=True)
        self._mesh.start_nodes([replace(s, models=(f"{MODEL}={self.files(s.node_id)}",)) for s in specs])
        self._mesh.wait_for(lambda topology: topology.nodes.keys() >= set(node_ids), f"nodes {node_ids} are here")

    def files(self, node_id: str) -> Path:
        return self._folder / node_id


def deploy(admin: Admin, replicas: int = 0) -> Told:
    """With at most so many replicas; 0: as many as there is room for. Waits until all is as it should be."""
    answer = admin.call("DeployModel", {"model_id": MODEL, "kv_tokens": KV_TOKENS, "replicas": replicas})
    admin.settle()
    return answer


def reference(weights: Path, topology: Topology) -> Reference:
    """The unsharded model with the weights that a mesh without redundancy holds."""
    model = Reference(weights)
    shards = [shard for node in topology.nodes.values() for shard in node.shards]
    assert sorted(layer for shard in shards for layer in shard.layers.layers) == list(range(NUM_LAYERS))
    for shard in shards:
        if shard.quantization is not Quantization.BFLOAT16:
            model.quantize(shard.layers, shard.quantization)
    return model


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(5, 200))] for _ in range(count)]


def begun(admin: Admin, directives: list[Told]) -> dict[str, set[int]]:
    """By node the layers that it holds or has begun to load."""
    found = {node_id: {i for layers in held for i in layers.layers} for node_id, held in admin.held().items()}
    for directive in directives:
        if directive["state"] in ("DIRECTIVE_STATE_PENDING", "DIRECTIVE_STATE_ACCEPTED") and is_load(directive):
            found[directive["node_id"]] -= set(layers_of(directive).layers)
    return found


@contextlib.contextmanager
def paused_load(mesh: Mesh) -> Iterator[str]:
    """Stops the process of a node in the middle of a load, for the length of a `with`. Gives the node's id."""
    found: list[str] = []

    def loading() -> list[str]:
        with grpc.insecure_channel(mesh.tracker_address) as channel:
            answer = admin_pb2_grpc.AdminStub(channel).ListDirectives(admin_pb2.ListDirectivesRequest(), timeout=10)
        return [d.node_id for d in answer.directives if d.state == tracker_pb2.DIRECTIVE_STATE_LOADING]

    def is_paused() -> bool:
        for node_id in loading():
            process = mesh.nodes[node_id]
            process.process.send_signal(signal.SIGSTOP)
            log = process.output()
            if node_id in loading() and log.count("LOAD_SHARD layers") > log.count("serving layers"):
                found.append(node_id)
                return True
            process.process.send_signal(signal.SIGCONT)
        return False

    wait_until(is_paused, SETTLE_SECONDS, "a node is loading", mesh.logs)
    (node_id,) = found
    try:
        yield node_id
    finally:
        mesh.nodes[node_id].process.send_signal(signal.SIGCONT)


def loads_told(log: str) -> set[int]:
    """All layers that a node's log says were ordered to be loaded."""
    ranges = re.findall(r"LOAD_SHARD layers (\d+)-(\d+) of tiny", log)
    return {layer for start, end in ranges for layer in range(int(start), int(end))}
