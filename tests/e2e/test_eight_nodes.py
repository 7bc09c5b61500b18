"""Eight real nodes of different size and quantization: every rule of placement is provoked, and watched with grpcurl.

The tests share one mesh, which grows in the first ones. Each brings it into the state that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshnet.model import Quantization
from tests.e2e.admin import Admin, is_load, layers_of
from tests.e2e.commands import grpcurl_refused
from tests.e2e.eight_nodes import (
    MODEL,
    NUM_LAYERS,
    SPECS,
    TOLERATED_STEPS,
    Nodes,
    begun,
    deploy,
    loads_told,
    paused_load,
    prompts,
    reference,
)
from tests.e2e.mesh import SETTLE_SECONDS, Mesh, NodeSpec, running_mesh
from tests.e2e.streams import streams
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.e2e.watcher import Watcher, holders, watching
from tests.processes import wait_until

LEASE_SECONDS = 8
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


@pytest.fixture(scope="module")
def nodes(mesh: Mesh, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    return Nodes(mesh, weights, tmp_path_factory.mktemp("files"))


@pytest.fixture
def eight(nodes: Nodes, admin: Admin) -> None:
    nodes.ensure("abcdefgh")
    deploy(admin)


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
    deploy(admin)
    topology = mesh.wait_until_complete(MODEL)
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
    assert gaps
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
    # Of fewer nodes the tracker asks for fewer replicas, and all would seem settled.
    mesh.wait_for(lambda topology: topology.nodes.keys() >= SPECS.keys(), "all nodes are back")
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
    mesh.start_nodes([NodeSpec("stranger", room_for(4), models=(f"{MODEL}={other}",), options=("--no-fetch",))])
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
    failures = [d for d in admin.directives()[seen:] if d["state"] == "DIRECTIVE_STATE_FAILED"]
    # One plan may have given it several ranges; no later one gives it any.
    assert len({failed["plan_version"] for failed in failures}) == 1, failures
    for failed in failures:
        assert (failed["node_id"], failed["failure_kind"]) == (broken, "DIRECTIVE_FAILURE_BAD_FILES"), failures
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
