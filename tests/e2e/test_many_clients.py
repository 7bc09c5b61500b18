"""Two hundred clients at once, a third of which vanish, some read slowly: no answer is lost, and nothing is kept."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.raw_client import Manner, Outcome, RawClient
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama, token_ids
from tests.processes import wait_until

MODEL = "tiny"
NUM_CLIENTS = 200
NODES = [NodeSpec("a", room_for(3), tracker_node=True), NodeSpec("b", room_for(3))]
# Everything that is made once is made in the first rounds. 800 clients come after them.
WARM_ROUNDS, ROUNDS = 2, 6
# 8 kilobytes a client; less is noise. Nodes hold their KV caches from the start, but first touch
# a page of them when it is used.
MOST_GROWTH = 800 * 8192
KV_BYTES = 3 * 17 * 2**20


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    weights: Path = save_tiny_llama(tmp_path_factory.mktemp("tiny"), vocabulary=True)
    with running_mesh([f"{MODEL}={weights}"], NODES, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as running:
        yield running


def manner_of(index: int, draw: random.Random, num_tokens: int) -> Manner:
    """Every third leaves, every fifth is slow: some are both."""
    leaves_after = draw.randrange(num_tokens) if index % 3 == 0 else None
    return Manner(
        slow=index % 5 == 0, leaves_after=leaves_after, resets=leaves_after is not None and draw.random() < 0.5
    )


async def crowd(mesh: Mesh, seed: int) -> list[tuple[int, Outcome]]:
    """How many tokens each client asked for, and what became of it."""
    url = httpx.URL(mesh.gateway_url)
    assert url.port is not None
    draw = random.Random(seed)
    asked, clients = [], []
    for index in range(NUM_CLIENTS):
        num_tokens = draw.randint(8, 96)
        prompt = [draw.randrange(512) for _ in range(draw.randint(1, 200))]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        asked.append(num_tokens)
        clients.append(RawClient((url.host, url.port), body, manner_of(index, draw, num_tokens)))
    return list(zip(asked, await asyncio.gather(*(client.run() for client in clients)), strict=True))


def check(outcomes: list[tuple[int, Outcome]]) -> None:
    assert Counter(outcome.text is None for _, outcome in outcomes) == {False: 133, True: 67}
    for num_tokens, outcome in outcomes:
        if outcome.text is not None:
            assert outcome.finish_reason == "length"
            assert len(token_ids(outcome.text)) == num_tokens


def resident_bytes(mesh: Mesh) -> dict[str, int]:
    assert mesh.gateway
    processes = {"gateway": mesh.gateway, "tracker": mesh.tracker, **mesh.nodes}
    return {name: psutil.Process(one.process.pid).memory_info().rss for name, one in processes.items()}


def running_choices(mesh: Mesh) -> float:
    """What the gateway believes to be under way."""
    text = httpx.get(f"{mesh.gateway_url}/metrics", timeout=10).text
    counts = re.findall(r"^meshnet:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)
    assert len(counts) == 2
    return sum(map(float, counts))


@pytest.mark.slow
def test_no_answer_is_lost_and_nothing_is_kept(mesh: Mesh) -> None:
    before: dict[str, int] = {}
    for turn in range(ROUNDS):
        if turn == WARM_ROUNDS:
            before = resident_bytes(mesh)
        check(asyncio.run(crowd(mesh, turn)))
        mesh.wait_until_idle()
        wait_until(lambda: running_choices(mesh) == 0, 10, "the gateway has none under way")
        print({name: f"{size / 2**20:.1f}" for name, size in resident_bytes(mesh).items()})
    growth = {name: size - before[name] for name, size in resident_bytes(mesh).items()}
    for name, grown in growth.items():
        assert grown < MOST_GROWTH + (KV_BYTES if name in mesh.nodes else 0), growth
