"""Eight real nodes of different size and quantization: every rule of placement is provoked, and watched with grpcurl.

The tests share one mesh, which grows in the first ones. Each brings it into the state that it needs.
"""

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
import pytest

from meshnet.model import Quantization
from meshnet.topology import Topology
from meshnet.v1 import admin_pb2, admin_pb2_grpc, tracker_pb2
from tests.e2e.admin import Admin, Told, is_load, layers_of
from tests.e2e.commands import grpcurl_refused
from tests.e2e.mesh import SETTLE_SECONDS, Mesh, NodeSpec, running_mesh
from tests.e2e.streams import streams
from tests.e2e.tiny import VOCAB_SIZE, save_tiny_llama
from tests.e2e.watcher import Watcher, holders, watching
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "tiny"
NUM_LAYERS = 12
# A layer takes 16.8 MB: 16.78 of KV cache and 0.09, 0.05 or 0.02 of weights. That is more than a node gains when it
# has measured its workspace, for which 16.78 MB count until then; so it has room for as many layers before and after.
KV_TOKENS = 131072
SPECS = {
    spec.node_id: spec
    for spec in (
        NodeSpec("a", "67.6MB", "bfloat16", tracker_node=True),  # three layers
        NodeSpec("b", "50.7MB", "int8"),  # two
        NodeSpec("c", "67.6MB", "nf4"),  # three
        NodeSpec("d", "84.13MB", "bfloat16,int8"),  # three in bfloat16, four in int8
        NodeSpec("e", "50.7MB", "int8,nf4"),  # two
        NodeSpec("f", "67.6MB", "nf4"),  # three
        NodeSpec("g", "84.5MB", "bfloat16"),  # four
        NodeSpec("h", "101.4MB", "int8"),  # five
    )
}
LEASE_SECONDS = 8
# Products of int8 depend in their last bits on what else is multiplied with them. With the weights of bfloat16 in the
# place of the quantized ones tokens are fifty steps off.
TOLERATED_STEPS = 16.0
NO_NODE = re.compile(r"layers \d+-\d+ of tiny have no node")
REPLICA = re.compile(r"(second|third|further) replica of layers")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("weights") / MODEL, num_layers=NUM_LAYERS, vocabulary=True)


@pytest.fixture(scope="module")
def mesh(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A tracker with a state file and a gateway; no nodes yet."""
    state = tmp_path_factory.mktemp("state") / "tracker.db"
    quick = ("--heartbeat", "1", "--lease", str(LEASE_SECONDS))
    with running_mesh([f"{MODEL}={weights}"], [], tracker_options=("--state", str(state), *quick)) as running:
        running.start_gateway(until_ready=False)
        assert running.gateway
        with running.gateway:
            yield running


@pytest.fixture(scope="module")
def watcher(mesh: Mesh) -> Iterator[Watcher]:
    with watching(mesh.tracker_address) as running:
        yield running


@pytest.fixture(autouse=True)
def _rules_are_kept(watcher: Watcher) -> Iterator[None]:
    yield
    watcher.check()


@pytest.fixture
def admin(mesh: Mesh) -> Admin:
    return Admin(mesh)


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


@pytest.fixture(scope="module")
def nodes(mesh: Mesh, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    return Nodes(mesh, weights, tmp_path_factory.mktemp("files"))


@pytest.fixture
def eight(nodes: Nodes, admin: Admin) -> None:
    nodes.ensure("abcdefgh")
    deploy(admin)


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


def test_nothing_is_loaded_before_all_of_a_model_fits(nodes: Nodes, admin: Admin) -> None:
    nodes.ensure("abc")
    answer = deploy(admin)
    said = r"layers 8-12 of tiny \(67\.\d MB at \w+, KV cache included\) fit on no node; largest free: \w with .* once "
    assert re.match(said + "layers 0-8 are placed; nothing is loaded until all fits", answer["shortfall"])
    coverage = admin.coverage(MODEL)
    assert coverage["shortfall"] == answer["shortfall"]
    assert [layers_of({"layers": missing}) for missing in coverage["missing"]] == [layers_of({"layers": {"end": 12}})]
    assert admin.held() == {"a": [], "b": [], "c": []}
    assert admin.directives() == []


def test_one_route_through_all_quantizations_computes_what_it_should(
    nodes: Nodes, admin: Admin, mesh: Mesh, weights: Path
) -> None:
    nodes.ensure("abcd")
    topology = mesh.wait_until_complete(MODEL)
    admin.settle()
    assert [len(holding) for holding in holders(topology, MODEL)] == [1] * NUM_LAYERS
    used = {node["node_id"]: {s["quantization"] for s in node["shards"]} for node in admin.call("ListNodes")["nodes"]}
    # Preferring bfloat16, d has no room for its four layers: the fallback has.
    assert used == {
        "a": {"QUANTIZATION_BFLOAT16"},
        "b": {"QUANTIZATION_INT8"},
        "c": {"QUANTIZATION_NF4"},
        "d": {"QUANTIZATION_INT8"},
    }
    model = reference(weights, topology)
    for prompt in prompts(2):
        tokens = mesh.generate(MODEL, prompt, 24, "a")
        model.check(prompt, tokens, TOLERATED_STEPS)


def test_redundancy_comes_after_coverage(eight: None, admin: Admin, mesh: Mesh) -> None:
    topology = mesh.wait_for(lambda t: min(map(len, holders(t, MODEL))) >= 2, "every layer has two holders")
    admin.settle()
    reasons = [directive["reason"] for directive in admin.directives()]
    gaps = [index for index, reason in enumerate(reasons) if NO_NODE.fullmatch(reason)]
    replicas = [index for index, reason in enumerate(reasons) if REPLICA.match(reason)]
    assert len(gaps) == 4
    assert max(gaps) < min(replicas)
    quantizations = {shard.quantization for node in topology.nodes.values() for shard in node.shards}
    assert quantizations == {Quantization.BFLOAT16, Quantization.INT8, Quantization.NF4}


def test_a_drain_loses_no_request(eight: None, admin: Admin, mesh: Mesh, weights: Path) -> None:
    deploy(admin, replicas=1)
    model = reference(weights, mesh.topology())
    drained = max(set(mesh.layers(MODEL)) - {"a"})
    asked = prompts(4)
    with streams(mesh.gateway_url, MODEL, asked, 50) as clients:
        clients.wait_until_all_run()
        answer = admin.call("DrainNode", {"node_id": drained})
        assert clients.num_running == len(asked)
        answers = clients.tokens()
    assert "shortfalls" not in answer
    reasons = [directive["reason"] for directive in answer["directives"]]
    assert reasons
    assert all("move off a node that is drained" in reason for reason in reasons)
    for prompt, tokens in zip(asked, answers, strict=True):
        model.check(prompt, tokens, TOLERATED_STEPS)
    wait_until(lambda: not admin.held()[drained], SETTLE_SECONDS, f"{drained} is empty", mesh.logs)
    assert mesh.topology().coverage(MODEL).complete
    drops = [d for d in admin.call("DescribeNode", {"node_id": drained})["directives"] if not is_load(d)]
    assert drops[-1]["reason"] == "the node is drained; these layers are served elsewhere"


def test_a_drain_that_cannot_be_done_says_so(eight: None, admin: Admin, mesh: Mesh) -> None:
    deploy(admin, replicas=1)
    # The first ones make room elsewhere; what is left at last has no room for all.
    for node_id in sorted(SPECS, key=lambda node_id: (sum(map(len, admin.held()[node_id])), node_id)):
        answer = admin.call("DrainNode", {"node_id": node_id})
        admin.settle()
        if "shortfalls" in answer:
            break
    assert re.match(r"layers \d+-\d+ of tiny.* MB at \w+", answer["shortfalls"][0])
    assert admin.held()[node_id]
    assert admin.node(node_id)["draining"] is True
    assert mesh.topology().coverage(MODEL).complete
    with streams(mesh.gateway_url, MODEL, prompts(2), 10) as clients:
        clients.tokens()
    for other in SPECS:
        admin.call("DrainNode", {"node_id": other, "cancel": True})
    assert not any("draining" in node for node in admin.call("ListNodes")["nodes"])


def test_a_tracker_that_is_killed_during_a_load_orders_nothing_twice(
    eight: None, admin: Admin, mesh: Mesh, weights: Path
) -> None:
    deploy(admin, replicas=1)
    model = reference(weights, mesh.topology())
    asked = prompts(2)
    with streams(mesh.gateway_url, MODEL, asked, 80) as clients:
        clients.wait_until_all_run()
        admin.call("DeployModel", {"model_id": MODEL, "kv_tokens": KV_TOKENS, "replicas": 2})
        with paused_load(mesh) as paused:
            before = admin.directives()
            assert any(d["state"] == "DIRECTIVE_STATE_LOADING" for d in before if d["node_id"] == paused)
            known = begun(admin, before)
            written = {node_id: len(process.output()) for node_id, process in mesh.nodes.items()}
            assert clients.num_running == len(asked)
            mesh.restart_tracker()
        mesh.wait_until_complete(MODEL)
        answers = clients.tokens()
    admin.settle()
    for prompt, tokens in zip(asked, answers, strict=True):
        model.check(prompt, tokens, TOLERATED_STEPS)
    after = admin.directives()
    for directive in filter(is_load, after):
        assert not known[directive["node_id"]] & set(layers_of(directive).layers), directive
        assert REPLICA.match(directive["reason"]), directive
        assert int(directive["plan_version"]) > max(int(d["plan_version"]) for d in before)
    for node_id, process in mesh.nodes.items():
        loaded = loads_told(process.output()[written[node_id] :])
        assert not known[node_id] & loaded, node_id
        assert admin.call("DescribeNode", {"node_id": node_id})["node"]["node_id"] == node_id
    assert min(map(len, holders(mesh.topology(), MODEL))) == 2


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


def test_generations_outlive_the_tracker(eight: None, admin: Admin, mesh: Mesh) -> None:
    before, newest = admin.held(), max(int(d["plan_version"]) for d in admin.directives())
    written = {node_id: len(process.output()) for node_id, process in mesh.nodes.items()}
    with streams(mesh.gateway_url, MODEL, prompts(2), 60) as clients:
        clients.wait_until_all_run()
        mesh.tracker.kill()
        # Nobody needs it for a generation, not even for a new one.
        with streams(mesh.gateway_url, MODEL, prompts(2), 10) as late:
            late.tokens()
        clients.tokens()
    mesh.restart_tracker()
    mesh.wait_until_complete(MODEL)
    wait_until(lambda: admin.held() == before, SETTLE_SECONDS, "all shards are known again", mesh.logs)
    admin.settle()
    assert admin.directives() == []
    assert all(not loads_told(process.output()[written[i] :]) for i, process in mesh.nodes.items())
    deploy(admin, replicas=1)
    assert min(int(directive["plan_version"]) for directive in admin.directives()) > newest
    mesh.wait_until_idle()


def test_a_node_with_another_revision_gets_no_layers(eight: None, admin: Admin, mesh: Mesh, tmp_path: Path) -> None:
    other = save_tiny_llama(tmp_path / "other", seed=1, num_layers=NUM_LAYERS, context_length=512)
    mesh.start_nodes([NodeSpec("stranger", "84.5MB", models=(f"{MODEL}={other}",))])
    mesh.nodes["stranger"].wait_for("the mesh refuses a model: this node's files of tiny are another revision")
    admin.settle()
    assert admin.held()["stranger"] == []
    assert admin.call("ListDirectives", {"node_id": "stranger"}) == {}
    (model,) = admin.call("ListModels")["models"]
    assert sorted(model["node_ids"]) == sorted(SPECS)
    mesh.stop_node("stranger")


def test_a_node_of_another_wire_version_is_refused(mesh: Mesh, admin: Admin) -> None:
    node = {"node_id": "old", "forward_address": "127.0.0.1:1", "grpc_address": "127.0.0.1:2", "vram_bytes": 10**8}
    request = {"node": {**node, "quantization": "QUANTIZATION_INT8"}, "incarnation": "x", "wire_version": 99}
    refusal = grpcurl_refused(mesh.tracker_address, "meshnet.v1.Tracker/Register", data=request)
    assert "node 'old' speaks wire version 99, this mesh speaks 1" in refusal
    assert "old" not in admin.held()


def test_a_failed_load_is_replanned(eight: None, nodes: Nodes, admin: Admin, mesh: Mesh) -> None:
    deploy(admin, replicas=1)
    drained = max(set(mesh.layers(MODEL)) - {"a"})
    broken = admin.call("GetPlan", {"without_node_ids": [drained]})["directives"][0]["node_id"]
    damaged = nodes.files(broken) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:10_000])
    kept, seen = mesh.layers(MODEL).get(broken), len(admin.directives())
    admin.call("DrainNode", {"node_id": drained})
    wait_until(lambda: not admin.held()[drained], SETTLE_SECONDS, f"{drained} is empty", mesh.logs)
    admin.settle()
    (failed,) = [d for d in admin.directives()[seen:] if d["state"] == "DIRECTIVE_STATE_FAILED"]
    assert (failed["node_id"], failed["failure_kind"]) == (broken, "DIRECTIVE_FAILURE_BAD_FILES")
    assert "cut short" in failed["failure"]
    assert f"node {broken} is now believed: cannot load tiny" in admin.events()
    # What it has loaded before it goes on serving.
    assert mesh.layers(MODEL).get(broken) == kept
    assert mesh.topology().coverage(MODEL).complete
    admin.call("DrainNode", {"node_id": drained, "cancel": True})


def test_a_gap_is_filled_before_anything_is_redundant(eight: None, admin: Admin, mesh: Mesh) -> None:
    """All holders of a layer are killed, and no node has free room."""
    topology = mesh.topology()
    vram = {node_id: node.vram_bytes for node_id, node in topology.nodes.items()}
    doomed = min((ids for ids in holders(topology, MODEL) if "a" not in ids), key=lambda ids: sum(vram[i] for i in ids))
    seen = len(admin.events())
    for node_id in doomed:
        mesh.kill_node(node_id)
    mesh.wait_for(lambda t: not t.nodes.keys() & doomed, "the killed nodes are lost")
    mesh.wait_until_complete(MODEL)
    admin.settle()
    events = admin.events()[seen:]
    lost = max(index for index, text in enumerate(events) if re.match(r"node \w lost", text))
    assert any(text.startswith("model tiny uncovered: layers") for text in events)
    issued = [text.partition(": ")[2] for text in events[lost:] if text.startswith("directive issued")]
    assert any("makes room for layers" in text for text in issued)
    gap = max(index for index, text in enumerate(issued) if "have no node" in text)
    redundant = [index for index, text in enumerate(issued) if REPLICA.search(text)]
    assert not redundant or gap < min(redundant), issued
    mesh.wait_until_idle()
