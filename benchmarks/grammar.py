"""What it costs to keep a text to a form: tokens a second with a grammar and without.

    python -m benchmarks.grammar --streams 1,16

SmolLM2-135M in bfloat16 on two nodes of one thread each, behind a gateway; prompts of 32 tokens, 96 new ones, greedy
and drawn, no speculation. No form has ended by then: all texts have as many tokens. One mesh is asked for each kind of
text in turn, so that what else the machine does is the same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import defaultdict
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.completions import random_prompt
from benchmarks.streams import KV_TOKENS, MODEL, REQUEST_SECONDS, specs
from tests.e2e.mesh import running_mesh
from tests.smollm2 import smollm2_path

PROMPT_TOKENS, NEW_TOKENS = 32, 96
FREE = "free"
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 24},
        "kind": {"enum": ["animal", "plant", "mineral"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    FREE: {},
    "schema": {"guided_json": {"type": "array", "items": _ITEM, "minItems": 200}},
    "regex": {"guided_regex": r"([A-Z][a-z]{1,12} ){500}"},
}
TEMPERATURES = {"greedy": 0.0, "drawn": 1.0}
# By streams, temperature and form.
Seen = dict[tuple[int, str, str], list[float]]


async def tokens_per_second(url: str, num_streams: int, temperature: float, form: str, seed: int) -> float:
    """Of all streams together."""
    draw = random.Random(seed)

    async def answer(client: httpx.AsyncClient) -> int:
        body = {
            "model": MODEL, "prompt": random_prompt(draw, PROMPT_TOKENS), "max_tokens": NEW_TOKENS, "seed": seed,
            "temperature": temperature, "ignore_eos": True, **FORMS[form],
        }  # fmt: skip
        said = await client.post(f"{url}/v1/completions", json=body)
        said.raise_for_status()
        count: int = said.json()["usage"]["completion_tokens"]
        return count

    async with httpx.AsyncClient(timeout=REQUEST_SECONDS) as client:
        started = time.monotonic()
        counts = await asyncio.gather(*(answer(client) for _ in range(num_streams)))
        seconds = time.monotonic() - started
    if set(counts) != {NEW_TOKENS}:
        raise RuntimeError(f"a text of the form {form!r} ended behind {min(counts)} tokens")
    return sum(counts) / seconds


def measured(url: str, streams: list[int], repeats: int) -> Seen:
    seen: Seen = defaultdict(list)
    for form in FORMS:
        # Compiled, and its vocabulary sent.
        asyncio.run(tokens_per_second(url, 1, 0.0, form, 0))
    for repeat in range(1, repeats + 1):
        for count in streams:
            for name, temperature in TEMPERATURES.items():
                for form in FORMS if repeat % 2 else reversed(FORMS):
                    rate = asyncio.run(tokens_per_second(url, count, temperature, form, repeat))
                    seen[count, name, form].append(rate)
    return seen


def table_of(seen: Seen) -> Table:
    kept = [form for form in FORMS if form != FREE]
    table = Table("streams", "", *FORMS, *(f"{form} / {FREE}" for form in kept), title="Tokens/s, medians")
    for count, name in dict.fromkeys((count, name) for count, name, _ in seen):
        rates = {form: statistics.median(seen[count, name, form]) for form in FORMS}
        ratios = [f"{rates[form] / rates[FREE]:.2f}" for form in kept]
        table.add_row(str(count), name, *(f"{rate:.1f}" for rate in rates.values()), *ratios)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16", help="Streams at once, with commas.")
    parser.add_argument("--repeats", type=int, default=3, help="Medians of so many.")
    arguments = parser.parse_args()
    streams = [int(count) for count in arguments.streams.split(",")]
    nodes = specs(2, "--speculate", "off")
    with running_mesh([f"{MODEL}={smollm2_path()}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as mesh:
        Console().print(table_of(measured(mesh.gateway_url, streams, arguments.repeats)))


if __name__ == "__main__":
    main()
