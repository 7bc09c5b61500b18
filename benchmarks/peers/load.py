"""What is asked of each system, over its OpenAI API: streams at once, and long prompts for one token."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from benchmarks.completions import Completion, complete, percentile, random_prompt
from benchmarks.peers.systems import Endpoint

PROMPT_TOKENS, NEW_TOKENS = 128, 64
PREFILL_REPEATS = 3
REQUEST_SECONDS = 600.0


@dataclass
class Figures:
    """Output tokens a second, ms to the first token (median) and between two (median, p95), by streams at once; tokens
    of a prompt a second, by its length."""

    rates: dict[int, float] = field(default_factory=dict)
    firsts: dict[int, float] = field(default_factory=dict)
    gaps: dict[int, tuple[float, float]] = field(default_factory=dict)
    prefills: dict[int, float] = field(default_factory=dict)


async def measure(endpoint: Endpoint, counts: Sequence[int], lengths: Sequence[int], seed: int) -> Figures:
    """`seed` makes the prompts, so that none was seen before."""
    draw = random.Random(seed)
    figures = Figures()
    # A connection for each request: some close those that idle, in the moment in which they are used again.
    limits = httpx.Limits(max_connections=max(counts), max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS, limits=limits) as client:
        # Twice: what is compiled or allocated at first use is no figure of anybody's.
        for _ in range(2):
            await asyncio.gather(*(_ask(client, endpoint, random_prompt(draw, PROMPT_TOKENS), 8) for _ in range(4)))
        for count in counts:
            started = time.monotonic()
            prompts = [random_prompt(draw, PROMPT_TOKENS) for _ in range(count)]
            answers = await asyncio.gather(*(_ask(client, endpoint, prompt, NEW_TOKENS) for prompt in prompts))
            seconds = time.monotonic() - started
            figures.rates[count] = sum(answer.num_tokens for answer in answers) / seconds
            figures.firsts[count] = 1e3 * statistics.median(a.moments[0] - a.started for a in answers)
            gaps = [1e3 * (b - a) for answer in answers for a, b in pairwise(answer.moments)]
            figures.gaps[count] = percentile(gaps, 0.5), percentile(gaps, 0.95)
        for length in lengths:
            seconds = min([await _first(client, endpoint, random_prompt(draw, length)) for _ in range(PREFILL_REPEATS)])
            figures.prefills[length] = length / seconds
    return figures


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, prompt: Sequence[int], num_tokens: int) -> Completion:
    return await complete(client, endpoint.url, endpoint.model, prompt, num_tokens, ignore_eos=True)


async def _first(client: httpx.AsyncClient, endpoint: Endpoint, prompt: Sequence[int]) -> float:
    """Seconds to the first token."""
    answer = await _ask(client, endpoint, prompt, 1)
    return answer.moments[0] - answer.started
