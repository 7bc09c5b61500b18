"""Tokens chosen, or scored, from the last layer's output: norm and head once for all rows, then each row on its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshnet.errors import MeshnetError
from meshnet.logprobs import TokenLogprobs
from services.node.core.choices import Choice
from services.node.core.work import SampleWork, ScoreWork
from services.node.engine.logits import token_logprobs
from services.node.engine.sampling import choose, choose_greedy
from services.node.engine.shard import Entry


def draw(entry: Entry, hidden: torch.Tensor, works: Sequence[SampleWork]) -> list[Choice | MeshnetError]:
    """Of `[works, hidden]`, a token for each, or why there is none."""
    if all(work.takes_largest for work in works):
        return choose_greedy(*entry.largest_logits(hidden))
    logits = entry.logits(hidden)
    # Of all rows, though some may not want it: one call costs less than one a row.
    greedy = choose_greedy(*logits.max(dim=-1))
    return [greedy[index] if work.takes_largest else _choose(logits[index], work) for index, work in enumerate(works)]


def score(entry: Entry, hidden: torch.Tensor, work: ScoreWork) -> tuple[TokenLogprobs, ...]:
    """Of `[targets, hidden]`. Raises NotFinite if the hidden states lead to no probabilities."""
    rows = zip(entry.logits(hidden), work.targets, strict=True)
    return tuple(token_logprobs(logits, target, work.top_logprobs) for logits, target in rows)


def _choose(logits: torch.Tensor, work: SampleWork) -> Choice | MeshnetError:
    try:
        token = choose(logits, work.sampling, work.uniform, work.place)
        if work.top_logprobs is None:
            return Choice(token)
        return Choice(token, token_logprobs(logits, token, work.top_logprobs))
    except MeshnetError as error:
        return error
