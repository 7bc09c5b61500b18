"""transformers without a server: `generate` in this process, all streams as one batch, on all cores."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks.completions import percentile, random_prompt
from benchmarks.peers.load import NEW_TOKENS, PREFILL_REPEATS, PROMPT_TOKENS, Figures
from tests.parity import Reference
from tests.smollm2 import smollm2_path


@dataclass(frozen=True)
class Alone:
    name: str = "transformers, no server"

    def measure(self, counts: Sequence[int], lengths: Sequence[int], seed: int) -> Figures:
        model, draw, figures = Reference(smollm2_path()).model, random.Random(seed), Figures()
        _generate(model, [random_prompt(draw, PROMPT_TOKENS)], 8)
        for count in counts:
            moments = _generate(model, [random_prompt(draw, PROMPT_TOKENS) for _ in range(count)], NEW_TOKENS)
            figures.rates[count] = count * NEW_TOKENS / moments[-1]
            figures.firsts[count] = 1e3 * moments[0]
            gaps = [1e3 * (b - a) for a, b in pairwise(moments)]
            figures.gaps[count] = percentile(gaps, 0.5), percentile(gaps, 0.95)
        for length in lengths:
            firsts = [_generate(model, [random_prompt(draw, length)], 1)[0] for _ in range(PREFILL_REPEATS)]
            figures.prefills[length] = length / min(firsts)
        return figures


@torch.inference_mode()
def _generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[float]:
    """Seconds until each token of a batch was there: logits processors are called before each is chosen."""
    ids = torch.tensor([list(prompt) for prompt in prompts])
    started, moments = time.monotonic(), []
    options = {"do_sample": False, "min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
        logits_processor=[_clocked(lambda: moments.append(time.monotonic() - started))],
        **options,
    )
    return [*moments[1:], time.monotonic() - started]


def _clocked(on_step: Callable[[], None]) -> Callable[[Any, Any], Any]:
    def process(_ids: Any, scores: Any) -> Any:
        on_step()
        return scores

    return process
