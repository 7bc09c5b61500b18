"""Prefix reuse in a mesh of two real nodes: the same tokens as the unsharded model, and fewer that are computed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from meshnet.topology import Topology
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.tiny import save_tiny_llama, token_ids
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "tiny"
KV_TOKENS = 65536
# Three layers each: with room for so many tokens one takes 8.4 MB.
ROOM = f"{16.8 + 8.5 * 3.5:.1f}MB"
NODES = [NodeSpec("a", ROOM, tracker_node=True), NodeSpec("b", ROOM)]


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(512) for _ in range(count)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), vocabulary=True, initializer_range=0.12)


@pytest.fixture(scope="module")
def reference(weights: Path) -> Reference:
    return Reference(weights)


@pytest.fixture(scope="module")
def mesh(weights: Path) -> Iterator[Mesh]:
    with running_mesh([f"{MODEL}={weights}"], NODES, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as running:
        assert running.layers(MODEL) == {"a": ["0-3"], "b": ["3-6"]}
        yield running
        running.wait_until_idle()


def complete(mesh: Mesh, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{mesh.gateway_url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    return token_ids(answer["choices"][0]["text"]), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_chat_over_the_gateway_goes_on_from_what_it_left(mesh: Mesh, reference: Reference) -> None:
    text = words(1, 290)
    for turn in range(4):
        prompt = [*text, *words(10 + turn, 40)]
        tokens, cached = complete(mesh, prompt, 30)
        assert cached == ((len(text) - 1) // 128 * 128 if turn else 0)
        reference.check(prompt, tokens)
        text = [*prompt, *tokens]
    mesh.wait_until_idle()
    assert {mesh.health(node_id)["kv"][MODEL]["tokens_kept"] for node_id in "ab"} == {512}


def test_prompts_at_once_share_what_they_begin_with(mesh: Mesh, reference: Reference) -> None:
    system = words(2, 400)
    assert complete(mesh, [*system, 1], 5)[1] == 0
    prompts = [[*system, *words(100 + index, 50)] for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: complete(mesh, prompt, 20), prompts))
    for prompt, (tokens, _) in zip(prompts, answers, strict=True):
        reference.check(prompt, tokens)
    # The first takes over what was left, and the next may come before it has its own prompt.
    assert all(cached in (0, 384) for _, cached in answers)
    assert sum(cached for _, cached in answers) >= 384
    tokens, cached = complete(mesh, [*system, *words(99, 50)], 20)
    assert cached == 384
    reference.check([*system, *words(99, 50)], tokens)


def test_a_hop_that_was_restarted_has_nothing_left_and_nobody_notices(mesh: Mesh, reference: Reference) -> None:
    text = words(3, 300)
    text += complete(mesh, text, 10)[0]
    assert complete(mesh, text, 10)[1] == 256
    mesh.kill_node("b")
    mesh.start_nodes([NODES[1]])
    address = mesh.nodes["b"].match[1]

    def serves_again(topology: Topology) -> bool:
        node = topology.nodes.get("b")
        return node is not None and node.forward_address == address and topology.coverage(MODEL).complete

    mesh.wait_for(serves_again, "the new process serves the layers")
    wait_until(lambda: _is_ready(mesh), 60, "the gateway knows a route that is proven")
    tokens, cached = complete(mesh, text, 10)
    assert cached == 0
    reference.check(text, tokens)
    assert complete(mesh, text, 10) == (tokens, 256)


def _is_ready(mesh: Mesh) -> bool:
    return bool(httpx.get(f"{mesh.gateway_url}/health", timeout=10).json().get("status") == "ok")


def test_what_is_kept_makes_room_and_gives_the_same_tokens(weights: Path) -> None:
    """Sessions of more than half the room there is, one after the other, and one that is as long as can be. In int8."""
    nodes, options = [NodeSpec("a", "60MB", tracker_node=True)], ["--kv", "int8"]
    with running_mesh([f"{MODEL}={weights}"], nodes, deploy=[MODEL], kv_tokens=1024, tracker_options=options) as mesh:
        for seed in range(4):
            prompt = words(seed, 600)
            tokens = mesh.generate(MODEL, prompt, 40)
            assert mesh.generate_and_count(MODEL, prompt, 40) == (tokens, 512)
        assert len(mesh.generate(MODEL, words(9, 1000), 24)) == 24
        mesh.wait_until_idle()


def test_reuse_can_be_turned_off(weights: Path) -> None:
    nodes = [NodeSpec("a", "60MB", tracker_node=True, options=("--no-prefix-reuse",))]
    with running_mesh([f"{MODEL}={weights}"], nodes, deploy=[MODEL], kv_tokens=4096) as mesh:
        prompt = words(1, 300)
        tokens = mesh.generate(MODEL, prompt, 5)
        assert mesh.generate_and_count(MODEL, prompt, 5) == (tokens, 0)
        assert mesh.health("a")["kv"][MODEL]["tokens_kept"] == 0
