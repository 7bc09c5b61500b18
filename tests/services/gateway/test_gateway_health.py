"""`/health` answers while long prompts are tokenized and many connections are open."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from tests.processes import wait_until
from tests.services.gateway.fake_mesh import FakeMesh, model, shard, tokens_then_wait
from tests.services.gateway.gateway_process import Gateway, running_gateway

NUM_CONNECTIONS = 200
NUM_CHECKS = 20
NUM_TOKENS = 100_000
# Tokenized two at a time, a few hundred milliseconds each.
NUM_PROMPTS = 12


@pytest.fixture
def gateway(smollm2_gguf: Path) -> Iterator[Gateway]:
    """With 200 connections: 30 of them with a stream (the mesh behind it has no more threads), the others idle."""
    with FakeMesh() as mesh, contextlib.ExitStack() as stack:
        mesh.tell(mesh.a.node(shard("smol")), smol=model("smol", context_length=2 * NUM_TOKENS))
        mesh.a.script = tokens_then_wait(28)
        gateway = stack.enter_context(
            running_gateway("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}", "--log-level", "warning")
        )
        wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
        for index in range(NUM_CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(gateway.address, timeout=30))
            if index % 7 == 0:
                body = json.dumps({"model": "smol", "prompt": "x", "max_tokens": 9, "stream": True})
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body.encode())
                assert connection.recv(12) == b"HTTP/1.1 200"
        yield gateway


def test_health_is_told_while_prompts_of_100k_tokens_are_tokenized(gateway: Gateway) -> None:
    ask = {"model": "smol", "prompt": "hello world " * (NUM_TOKENS // 2)}
    took = []
    with ThreadPoolExecutor(NUM_PROMPTS) as pool, httpx.Client(timeout=60) as client:
        prompts = [
            pool.submit(httpx.post, f"{gateway.url}/tokenize", json=ask, timeout=120) for _ in range(NUM_PROMPTS)
        ]
        wait(prompts, timeout=60, return_when=FIRST_COMPLETED)
        for _ in range(NUM_CHECKS):
            began = time.perf_counter()
            assert client.get(f"{gateway.url}/health").json()["status"] == "ok"
            took.append(1000 * (time.perf_counter() - began))
        num_pending = sum(not prompt.done() for prompt in prompts)
        assert all(prompt.result().json()["count"] > NUM_TOKENS - 10 for prompt in prompts)
    print(
        f"{num_pending} prompts pending; /health took {sorted(took)[NUM_CHECKS // 2]:.1f} ms, {max(took):.1f} at most"
    )
    assert num_pending
