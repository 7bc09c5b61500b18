"""Streams whose nodes are killed or fall silent: their clients notice a pause, and every token is the right one."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.eight_nodes import prompts
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.streams import Streams, streams
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.e2e.watcher import holders
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "tiny"
NEW_TOKENS = 400
# Over thousands of tokens some are nearly even. A token that was computed from something else is fifty steps off.
TOLERATED_STEPS = 8.0
# Of the three pairs of layers two are held twice, and whichever is not held any more finds a node.
SPECS = [NodeSpec("a", room_for(2), tracker_node=True), *(NodeSpec(node_id, room_for(2)) for node_id in "bcde")]
QUICK = ("--heartbeat", "0.5", "--lease", "3")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), vocabulary=True)


@pytest.fixture(scope="module")
def reference(weights: Path) -> Reference:
    return Reference(weights)


@pytest.fixture(scope="module")
def running(weights: Path) -> Iterator[Mesh]:
    with running_mesh(
        [f"{MODEL}={weights}"],
        [],
        kv_tokens=KV_TOKENS,
        tracker_options=("--deploy", MODEL, *QUICK),
        gateway=True,
    ) as started:
        yield started


@pytest.fixture
def mesh(running: Mesh) -> Iterator[Mesh]:
    """All nodes, also those that the test before has lost; ends when nobody holds anything for a session."""
    running.start_nodes([spec for spec in SPECS if spec.node_id not in running.nodes])
    running.wait_for(
        lambda t: len(t.nodes) == len(SPECS) and all(len(node.layers(MODEL)) == 2 for node in t.nodes.values()),
        "all is held twice",
    )
    yield running
    bury(running, *(node_id for node_id, node in running.nodes.items() if node.process.poll() is not None))
    running.wait_until_idle()


def in_use(mesh: Mesh, layer: int) -> str:
    """A node that has sessions through this layer."""

    def found() -> list[str]:
        holding = holders(mesh.topology(), MODEL)[layer] & mesh.nodes.keys()
        return [node_id for node_id in holding if mesh.health(node_id)["sessions"]]

    wait_until(found, 20, f"a session passes layer {layer}", mesh.logs)
    return found()[0]


def lose(mesh: Mesh, node_id: str, how: signal.Signals) -> None:
    mesh.nodes[node_id].process.send_signal(how)


def bury(mesh: Mesh, *node_ids: str) -> None:
    for node_id in node_ids:
        with mesh.nodes.pop(node_id) as process:
            process.kill()


@pytest.mark.parametrize(
    ("how", "layer", "num_streams"),
    [
        pytest.param(signal.SIGKILL, 2, 1, id="killed in the middle"),
        pytest.param(signal.SIGKILL, 4, 8, id="killed at the end of eight", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 2, 8, id="silent in the middle of eight"),
    ],
)
def test_a_stream_outlives_a_node_of_its_route(
    mesh: Mesh, reference: Reference, how: signal.Signals, layer: int, num_streams: int
) -> None:
    asked = prompts(num_streams)
    with streams(mesh.gateway_url, MODEL, asked, NEW_TOKENS) as clients:
        clients.wait_until_all_run()
        lost = in_use(mesh, layer)
        lose(mesh, lost, how)
        check(clients, asked, reference)
    bury(mesh, lost)


def test_what_a_seed_draws_is_what_it_would_have_been(mesh: Mesh) -> None:
    """To the bit: alone, a stream is computed in the same steps before and after."""

    def drawn() -> list[int]:
        return mesh.generate(MODEL, prompts(1)[0], NEW_TOKENS, temperature=1.0, top_p=0.95, seed=7)

    undisturbed = drawn()
    with ThreadPoolExecutor(1) as pool:
        disturbed = pool.submit(drawn)
        lost = in_use(mesh, 4)
        lose(mesh, lost, signal.SIGKILL)
        assert disturbed.result(120) == undisturbed
    bury(mesh, lost)


def check(clients: Streams, asked: list[list[int]], reference: Reference) -> None:
    began = time.monotonic()
    for prompt, tokens in zip(asked, clients.tokens(), strict=True):
        reference.check(prompt, tokens, TOLERATED_STEPS)
    print(f"all there after {time.monotonic() - began:.1f} s")
