"""What streams that run notice of a long prompt that arrives: `python -m benchmarks.long_prompt [--nodes 2]`.

SmolLM2-135M in bfloat16 on nodes of one thread each, speculation off. Times between two tokens of all streams, for as
long as the prompt takes to its first token, against as long before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from itertools import pairwise

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import streams
from benchmarks.completions import complete, percentile, random_prompt
from tests.e2e.mesh import running_mesh
from tests.smollm2 import smollm2_path

PROMPT_TOKENS = 4000
NUM_STREAMS = 8
# Enough for a stream to outlast the prompt on the slowest machine.
STREAM_TOKENS = 1000
WARM_UP_SECONDS = 3.0


async def stream(
    client: httpx.AsyncClient, url: str, prompt: list[int], num_tokens: int, moments: list[float], begun: asyncio.Event
) -> None:
    """Adds the moment of each event, and says when there is one."""

    def on_event(moment: float) -> None:
        moments.append(moment)
        begun.set()

    await complete(client, url, streams.MODEL, prompt, num_tokens, ignore_eos=True, on_event=on_event)


async def measure(url: str, seed: int) -> tuple[list[float], list[float], float]:
    """Seconds between tokens before the prompt and while it runs, and how long it took."""
    draw = random.Random(seed)
    lengths = [streams.PROMPT_TOKENS] * NUM_STREAMS + [PROMPT_TOKENS]
    prompts = [random_prompt(draw, length) for length in lengths]
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=NUM_STREAMS + 1)) as client:
        moments: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        running = [
            asyncio.create_task(stream(client, url, prompt, STREAM_TOKENS, times, event))
            for prompt, times, event in zip(prompts, moments, begun, strict=False)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        await asyncio.sleep(2 * WARM_UP_SECONDS)
        started = time.monotonic()
        await stream(client, url, prompts[-1], 1, [], asyncio.Event())
        ended = time.monotonic()
        assert not any(task.done() for task in running), "the streams ended before the prompt"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    gaps = [(b, b - a) for times in moments for a, b in pairwise(times)]
    since = started - WARM_UP_SECONDS
    return (
        [g for at, g in gaps if since < at <= started],
        [g for at, g in gaps if started < at <= ended],
        ended - started,
    )


def share(gaps: list[float], part: float) -> float:
    """In ms."""
    return 1e3 * percentile(gaps, part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    specs = streams.specs(arguments.nodes, "--speculate", "off")
    table = Table("run", "p50, ms", "p95", "p50 meanwhile", "p95 meanwhile", "p95, ratio", "prompt, s")
    table.title = f"{NUM_STREAMS} streams on {arguments.nodes} nodes while a prompt of {PROMPT_TOKENS} tokens arrives"
    with running_mesh(
        [f"{streams.MODEL}={smollm2_path()}"], specs, deploy=[streams.MODEL], kv_tokens=streams.KV_TOKENS, gateway=True
    ) as mesh:
        asyncio.run(streams.run(mesh.gateway_url, 2, seed=0))
        for run in range(arguments.repeats):
            before, meanwhile, seconds = asyncio.run(measure(mesh.gateway_url, seed=run))
            table.add_row(
                str(run + 1), f"{share(before, 0.5):.0f}", f"{share(before, 0.95):.0f}",
                f"{share(meanwhile, 0.5):.0f}", f"{share(meanwhile, 0.95):.0f}",
                f"{share(meanwhile, 0.95) / share(before, 0.95):.2f}", f"{seconds:.1f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
