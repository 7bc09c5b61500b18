"""The systems that are compared, each started as its own users would, on loopback: a URL that speaks OpenAI's API.

All serve SmolLM2-135M in bfloat16. Those over several processes have one thread each, those in one process have two.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from benchmarks import streams
from tests.e2e.mesh import running_mesh
from tests.smollm2 import smollm2_path

START_SECONDS = 600.0
STOP_SECONDS = 20.0
# Of one session; llama.cpp divides what it is given by the number of its slots.
CONTEXT_TOKENS = 4096


@dataclass(frozen=True)
class Endpoint:
    """Where a system answers, and under which name it knows the model."""

    url: str
    model: str


@dataclass(frozen=True)
class System:
    """`start` takes the number of streams that it shall be ready for, and serves until it is left."""

    name: str
    start: Callable[[int], AbstractContextManager[Endpoint]]


def meshnet(num_nodes: int, *, speculate: bool = False) -> System:
    """Without speculation unless told: what a model makes of random prompts repeats itself, which is no fair text."""
    options = () if speculate else ("--speculate", "off")

    @contextmanager
    def start(_num_streams: int) -> Iterator[Endpoint]:
        with running_mesh(
            [f"{streams.MODEL}={smollm2_path()}"],
            streams.specs(num_nodes, *options),
            deploy=[streams.MODEL],
            kv_tokens=streams.KV_TOKENS,
            gateway=True,
        ) as mesh:
            yield Endpoint(mesh.gateway_url, streams.MODEL)

    return System(f"meshnet, {num_nodes} node{'s' * (num_nodes > 1)}{', speculating' * speculate}", start)


def llama_rpc(binaries: Path, model: Path, num_servers: int = 2) -> System:
    """llama.cpp's server in front of RPC servers that hold all layers."""

    @contextmanager
    def start(num_streams: int) -> Iterator[Endpoint]:
        with ExitStack() as stack:
            addresses = []
            for _ in range(num_servers):
                port = free_port()
                stack.enter_context(process([binaries / "ggml-rpc-server", "-t", "1", "-p", str(port)]))
                wait_for_port(port)
                addresses.append(f"127.0.0.1:{port}")
            options = ["--rpc", ",".join(addresses), "-ngl", "99", "-t", "1"]
            yield stack.enter_context(_llama_server(binaries, model, num_streams, options))

    return System(f"llama.cpp, {num_servers} RPC servers", start)


def llama_alone(binaries: Path, model: Path) -> System:
    """llama.cpp's server with both threads and no network."""

    @contextmanager
    def start(num_streams: int) -> Iterator[Endpoint]:
        with _llama_server(binaries, model, num_streams, ["-t", "2"]) as endpoint:
            yield endpoint

    return System("llama.cpp, no network", start)


def vllm(python: Path, folder: Path, stages: int) -> System:
    """vLLM with pipeline parallel over one thread a stage; in one process with both threads."""

    @contextmanager
    def start(num_streams: int) -> Iterator[Endpoint]:
        port = free_port()
        command: list[str | Path] = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "smollm2"),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(max(num_streams, 16))),
            *("--pipeline-parallel-size", str(stages), "--no-enable-prefix-caching"),
        ]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(stages))) if stages > 1 else "0-1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with process(command, environment) as log:
            url = f"http://127.0.0.1:{port}"
            wait_for_health(url, log)
            yield Endpoint(url, "smollm2")

    return System(f"vLLM, pipeline of {stages}" if stages > 1 else "vLLM, no network", start)


@contextmanager
def _llama_server(binaries: Path, model: Path, num_streams: int, options: Sequence[str]) -> Iterator[Endpoint]:
    port = free_port()
    command: list[str | Path] = [
        *(binaries / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", str(port)),
        *("-np", str(num_streams), "-c", str(CONTEXT_TOKENS * max(1, num_streams // 8)), "-kvu"),
        *("--no-webui", "-fit", "off", "--cache-ram", "0", *options),
    ]
    with process(command) as log:
        url = f"http://127.0.0.1:{port}"
        wait_for_health(url, log)
        yield Endpoint(url, "smollm2")


@contextmanager
def process(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> Iterator[IO[bytes]]:
    """A process and those that it starts, until it is left. Yields what it has written."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [str(part) for part in command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
            start_new_session=True,
        )
        try:
            yield log
        finally:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing listens at port {port}") from None
            time.sleep(0.1)


def wait_for_health(url: str, log: IO[bytes]) -> None:
    """Raises TimeoutError with the end of what the process wrote."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline:
            log.seek(0)
            raise TimeoutError(f"{url} does not answer; its last words:\n{log.read()[-4000:].decode(errors='replace')}")
        time.sleep(0.2)
