"""A streamed completion of an OpenAI-compatible endpoint, and when its tokens came."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

# Ids that are words to SmolLM2, and none of its special tokens.
WORD_IDS = (1000, 40000)


@dataclass(frozen=True, slots=True)
class Completion:
    """`started`, and the `moments` of events with text, in seconds of the monotonic clock."""

    num_tokens: int
    started: float
    moments: tuple[float, ...]


async def complete(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    ignore_eos: bool = False,
    on_event: Callable[[float], None] = lambda moment: None,
) -> Completion:
    """Greedy. `on_event` hears of each moment as it comes. Raises RuntimeError with what the endpoint says."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "stream": True,
        "ignore_eos": ignore_eos, "stream_options": {"include_usage": True},
    }  # fmt: skip
    started, moments, count = time.monotonic(), [], 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url} answered {answer.status_code}: {(await answer.aread())[:500]!r}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if event.get("choices"):
                    moments.append(time.monotonic())
                    on_event(moments[-1])
                if event.get("usage"):
                    count = event["usage"]["completion_tokens"]
    return Completion(count, started, tuple(moments))


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def random_prompt(draw: random.Random, num_tokens: int) -> list[int]:
    return [draw.randrange(*WORD_IDS) for _ in range(num_tokens)]
