"""What runs in the next step: a pure choice from the queue."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from services.node.core.work import ForwardWork, FreeWork, PromptWork, SampleWork, SessionKey, Work

# Enough for four prefill chunks: one step stays short, so that decodes that arrive meanwhile wait little.
TOKEN_BUDGET = 512


def choose_batch(queue: Sequence[Work], token_budget: int = TOKEN_BUDGET) -> list[int]:
    """Indices into `queue` (in order of arrival) of the works that form the next step; empty only if the queue is.

    The first work is always among them. Others join if they are of its kind, model and layers, while the tokens stay
    within the budget. The works of one session never overtake each other, and never share a step. Nothing overtakes
    what frees memory: the room may have been promised to it.
    """
    chosen: list[int] = []
    passed: set[SessionKey] = set()
    tokens = 0
    for index, work in enumerate(queue):
        keys = _session_keys(work)
        fits = not chosen or (_kind(work) == _kind(queue[0]) and tokens + work.num_tokens <= token_budget)
        if fits and passed.isdisjoint(keys):
            chosen.append(index)
            tokens += work.num_tokens
        elif isinstance(work, FreeWork):
            break
        passed.update(keys)
    return chosen


def _kind(work: Work) -> Hashable:
    match work:
        case ForwardWork() | PromptWork():
            return type(work), work.model_id, work.layers
        case SampleWork():
            return SampleWork, work.model_id
        case FreeWork():
            return FreeWork


def _session_keys(work: Work) -> tuple[SessionKey, ...]:
    match work:
        case ForwardWork() | PromptWork():
            return tuple(segment.key for segment in work.segments)
        case FreeWork():
            return work.keys
        case SampleWork():
            return ()
