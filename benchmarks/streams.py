"""Streams through the gateway of a mesh on this machine: tokens a second, time to the first, time between two.

    python -m benchmarks.streams --nodes 1,2 --streams 1,4,16

SmolLM2-135M in bfloat16 on nodes of one thread each, prompts of 128 tokens and up to 64 new ones, all streams at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.completions import complete, random_prompt
from tests.e2e.mesh import NodeSpec, running_mesh
from tests.smollm2 import smollm2_path

MODEL = "smollm2-135m"
NUM_LAYERS = 30
PROMPT_TOKENS, NEW_TOKENS, KV_TOKENS = 128, 64, 16384
# In MB, at this KV room: what a node lends decides how many layers it gets.
ENTRY_MB, LAYER_MB, WORKSPACE_MB = 57.0, 7.1 + 12.6, 37.0
REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class Stream:
    """Tokens, and seconds from the request to the first and between two events."""

    num_tokens: int
    first: float
    gaps: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    streams: tuple[Stream, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(stream.num_tokens for stream in self.streams) / self.seconds

    @property
    def first_ms(self) -> float:
        return 1000 * statistics.median(stream.first for stream in self.streams)

    def gap_ms(self, share: float) -> float:
        gaps = sorted(gap for stream in self.streams for gap in stream.gaps)
        return 1000 * gaps[min(int(share * len(gaps)), len(gaps) - 1)]


def specs(num_nodes: int) -> list[NodeSpec]:
    layers = -(-NUM_LAYERS // num_nodes)
    lent = WORKSPACE_MB + LAYER_MB * (layers + 0.5)
    return [
        NodeSpec(f"n{index}", f"{lent + (ENTRY_MB if index == 0 else 0):.0f}MB", tracker_node=index == 0)
        for index in range(num_nodes)
    ]


async def ask(
    client: httpx.AsyncClient,
    url: str,
    seed: int,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
    *,
    ignore_eos: bool = False,
) -> Stream:
    prompt = random_prompt(random.Random(seed), prompt_tokens)
    answer = await complete(client, url, MODEL, prompt, new_tokens, ignore_eos=ignore_eos)
    # Tokens that make no text make no event.
    moments = answer.moments or (time.monotonic(),)
    gaps = tuple(b - a for a, b in pairwise(moments))
    return Stream(answer.num_tokens, moments[0] - answer.started, gaps)


async def run(url: str, num_streams: int, seed: int) -> Outcome:
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits) as client:
        started = time.monotonic()
        streams = await asyncio.gather(*(ask(client, url, seed + index) for index in range(num_streams)))
        return Outcome(tuple(streams), time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,2", help="Numbers of nodes, with commas.")
    parser.add_argument("--streams", default="1,4,16", help="Numbers of streams, with commas.")
    parser.add_argument("--repeats", type=int, default=2, help="The best of so many runs counts.")
    arguments = parser.parse_args()
    table = Table(
        "nodes", "streams", "tokens/s", "first, ms", "between, ms", "p95", title="Streams through the gateway"
    )
    for num_nodes in map(int, arguments.nodes.split(",")):
        with running_mesh(
            [f"{MODEL}={smollm2_path()}"], specs(num_nodes), deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True
        ) as mesh:
            asyncio.run(run(mesh.gateway_url, 2, seed=0))
            for num_streams in map(int, arguments.streams.split(",")):
                outcomes = [
                    asyncio.run(run(mesh.gateway_url, num_streams, seed=1000 * repeat + 1))
                    for repeat in range(arguments.repeats)
                ]
                best = max(outcomes, key=lambda outcome: outcome.tokens_per_second)
                table.add_row(
                    str(num_nodes), str(num_streams), f"{best.tokens_per_second:.1f}", f"{best.first_ms:.0f}",
                    f"{best.gap_ms(0.5):.1f}", f"{best.gap_ms(0.95):.1f}",
                )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
