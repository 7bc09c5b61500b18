"""What meshes of this machine do: real ones, and stubs, which do all but compute."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import httpx
import psutil

from benchmarks.streams import KV_TOKENS, MODEL, NEW_TOKENS, PROMPT_TOKENS, REQUEST_SECONDS, Stream, ask, specs
from meshnet.topology import Topology
from tests.e2e.mesh import Mesh, running_mesh
from tests.smollm2 import smollm2_path

SESSIONS = 16
LONG_PROMPT = 512
# Of stubs: a long answer less a short one, so that only steps are left.
SHORT_ANSWER, LONG_ANSWER = 16, 144


@dataclass(frozen=True, slots=True)
class Measured:
    """`first_token`: seconds until the first token behind a prompt of 512 tokens. Rates are in tokens a second."""

    single: float
    many: float
    first_token: float


@dataclass(frozen=True, slots=True)
class Bare:
    """Of stubs, in seconds a token: what a lone stream waits for each, what many together do, and the CPU time of all
    processes for each token of many."""

    single: float
    many: float
    cpu: float


@contextmanager
def mesh_of(num_nodes: int, *, stub: bool = False) -> Iterator[tuple[Mesh, Topology]]:
    """Serves SmolLM2-135M from so many nodes of one thread; also the topology, once all is loaded."""
    # What is estimated are steps of one token.
    nodes = [replace(spec, stub=stub) for spec in specs(num_nodes, "--speculate", "off")]
    with running_mesh([f"{MODEL}={smollm2_path()}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as mesh:
        topology = mesh.wait_for(
            lambda t: all(node.layers(MODEL) for node in t.nodes.values()), "every node serves some layers"
        )
        yield mesh, topology


def measure(mesh: Mesh, repeats: int = 2) -> Measured:
    """In turn, `repeats` times; the medians."""
    asyncio.run(_streams(mesh.gateway_url, 2, 0, NEW_TOKENS))
    rounds = [_measure_once(mesh.gateway_url, 1000 * (repeat + 1)) for repeat in range(repeats)]
    return Measured(
        statistics.median(found.single for found in rounds),
        statistics.median(found.many for found in rounds),
        statistics.median(found.first_token for found in rounds),
    )


def measure_bare(mesh: Mesh) -> Bare:
    asyncio.run(_streams(mesh.gateway_url, 2, 0, SHORT_ANSWER))
    single, _ = _a_token(mesh, 1)
    many, cpu = _a_token(mesh, SESSIONS)
    return Bare(single, many, cpu)


def _measure_once(url: str, seed: int) -> Measured:
    (alone,) = asyncio.run(_streams(url, 1, seed, NEW_TOKENS))
    many = asyncio.run(_streams(url, SESSIONS, seed + 1, NEW_TOKENS))
    (first,) = asyncio.run(_streams(url, 1, seed + 100, 1, LONG_PROMPT))
    return Measured((alone.num_tokens - 1) / sum(alone.gaps), steady_rate(many), first.first)


def steady_rate(streams: list[Stream]) -> float:
    """Tokens a second while all streams decode: from when the last one begins until the first one ends."""
    begin = max(stream.first for stream in streams)
    end = min(stream.first + sum(stream.gaps) for stream in streams)
    tokens = 0.0
    for stream in streams:
        moment, inside = stream.first, 0
        for gap in stream.gaps:
            moment += gap
            inside += begin < moment <= end
        # Some tokens share an event with others.
        tokens += inside * (stream.num_tokens - 1) / len(stream.gaps)
    return tokens / (end - begin)


def _a_token(mesh: Mesh, num_streams: int) -> tuple[float, float]:
    """Seconds and CPU seconds for each token of so many streams."""
    (short, short_cpu), (long, long_cpu) = (_timed(mesh, num_streams, length) for length in (SHORT_ANSWER, LONG_ANSWER))
    tokens = num_streams * (LONG_ANSWER - SHORT_ANSWER)
    return (long - short) / tokens, (long_cpu - short_cpu) / tokens


def _timed(mesh: Mesh, num_streams: int, new_tokens: int) -> tuple[float, float]:
    pids = [os.getpid(), mesh.tracker.process.pid, *(node.process.pid for node in mesh.nodes.values())]
    pids += [mesh.gateway.process.pid] if mesh.gateway else []
    processes = [psutil.Process(pid) for pid in pids]
    cpu, started = _cpu_seconds(processes), time.monotonic()
    asyncio.run(_streams(mesh.gateway_url, num_streams, 1, new_tokens))
    return time.monotonic() - started, _cpu_seconds(processes) - cpu


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(spent.user + spent.system for spent in times)


async def _streams(
    url: str, num_streams: int, seed: int, new_tokens: int, prompt_tokens: int = PROMPT_TOKENS
) -> list[Stream]:
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits) as client:
        asked = (
            ask(client, url, seed + index, prompt_tokens, new_tokens, ignore_eos=True) for index in range(num_streams)
        )
        return list(await asyncio.gather(*asked))
