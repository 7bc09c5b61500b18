"""Streams through the gateway of a mesh on this machine: tokens a second, time to the first, time between two.

    python -m benchmarks.streams --nodes 1,2 --streams 1,4,16,64 [--plot streams.svg]

SmolLM2-135M in bfloat16 on nodes of one thread each, prompts of 128 tokens and up to 64 new ones, all streams at once.
Times are the 50th, 95th and 99th percentile, in ms. What a model makes of random prompts repeats itself, so that
speculation, with which several tokens come at once, is off unless asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.completions import complete, percentile, random_prompt
from tests.e2e.mesh import NodeSpec, running_mesh
from tests.smollm2 import smollm2_path

MODEL = "smollm2-135m"
NUM_LAYERS = 30
PROMPT_TOKENS, NEW_TOKENS, KV_TOKENS = 128, 64, 16384
# In MB, at this KV room: what a node lends decides how many layers it gets.
ENTRY_MB, LAYER_MB, WORKSPACE_MB = 57.0, 7.1 + 12.6, 37.0
REQUEST_SECONDS = 600.0
# Each with its line in the plot.
PERCENTILES = {0.5: "-", 0.95: "--", 0.99: ":"}


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

    def first_ms(self, share: float) -> float:
        return 1000 * percentile([stream.first for stream in self.streams], share)

    def gap_ms(self, share: float) -> float:
        return 1000 * percentile([gap for stream in self.streams for gap in stream.gaps], share)


# By numbers of nodes, then of streams.
Results = dict[int, dict[int, Outcome]]


def specs(num_nodes: int, *options: str) -> list[NodeSpec]:
    """`options` are those of every node."""
    layers = -(-NUM_LAYERS // num_nodes)
    lent = WORKSPACE_MB + LAYER_MB * (layers + 0.5)
    return [
        NodeSpec(
            f"n{index}",
            f"{lent + (ENTRY_MB if index == 0 else 0):.0f}MB",
            tracker_node=index == 0,
            options=options,
        )
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


def measure(nodes: Sequence[NodeSpec], counts: Sequence[int], repeats: int) -> dict[int, Outcome]:
    """By number of streams, the best of `repeats` runs."""
    with running_mesh([f"{MODEL}={smollm2_path()}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as mesh:
        asyncio.run(run(mesh.gateway_url, 2, seed=0))
        best = {}
        for count in counts:
            outcomes = [asyncio.run(run(mesh.gateway_url, count, seed=1000 * each + 1)) for each in range(repeats)]
            best[count] = max(outcomes, key=lambda outcome: outcome.tokens_per_second)
        return best


def table(results: Results) -> Table:
    shares = "/".join(f"p{100 * share:.0f}" for share in PERCENTILES)
    shown = Table("nodes", "streams", "tokens/s", f"first, {shares}", f"between, {shares}", title="Through the gateway")
    for num_nodes, outcomes in results.items():
        for count, outcome in outcomes.items():
            cells = (_percentiles(outcome.first_ms, 0), _percentiles(outcome.gap_ms, 1))
            shown.add_row(str(num_nodes), str(count), f"{outcome.tokens_per_second:.1f}", *cells)
    return shown


def _percentiles(of: Callable[[float], float], digits: int) -> str:
    return "/".join(f"{of(share):.{digits}f}" for share in PERCENTILES)


def plot(results: Results, path: Path) -> None:
    """Writes SVG or PNG, by the name. Raises SystemExit, with what to do, if matplotlib is not installed."""
    try:
        from matplotlib import pyplot  # optional, and slow to import
    except ImportError:
        raise SystemExit("no plot without matplotlib: pip install 'meshnet[benchmarks]'") from None
    figure, (rates, gaps) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for num_nodes, outcomes in results.items():
        name = f"{num_nodes} node{'s' * (num_nodes > 1)}"
        (line,) = rates.plot(list(outcomes), [o.tokens_per_second for o in outcomes.values()], marker="o", label=name)
        for share, style in PERCENTILES.items():
            times = [outcome.gap_ms(share) for outcome in outcomes.values()]
            label = f"{name}, p{100 * share:.0f}"
            gaps.plot(list(outcomes), times, style, marker=".", color=line.get_color(), label=label)
    counts = sorted({count for outcomes in results.values() for count in outcomes})
    for axis, what in ((rates, "tokens/s, all streams"), (gaps, "ms between tokens")):
        axis.set(xlabel="streams", ylabel=what, xscale="log", ylim=(0, None))
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,2", help="Numbers of nodes, with commas.")
    parser.add_argument("--streams", default="1,4,16", help="Numbers of streams, with commas.")
    parser.add_argument("--repeats", type=int, default=2, help="The best of so many runs counts.")
    parser.add_argument("--speculate", choices=("off", "auto"), default="off")
    parser.add_argument("--plot", type=Path, help="Where to draw rates and times by streams, as SVG or PNG.")
    arguments = parser.parse_args()
    nodes, counts = ([int(part) for part in text.split(",")] for text in (arguments.nodes, arguments.streams))
    results = {n: measure(specs(n, "--speculate", arguments.speculate), counts, arguments.repeats) for n in nodes}
    Console().print(table(results))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
