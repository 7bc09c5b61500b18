"""What runs in the next step: a pure choice from the queue."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from services.node.core.work import (
    CacheWork,
    ForwardWork,
    FreeWork,
    KeepWork,
    PromptWork,
    ReuseWork,
    SampleWork,
    ScoreWork,
    SessionKey,
    Work,
)

# Enough for four prefill chunks. What is decoded meanwhile waits for all of them, so it is for steps without any.
TOKEN_BUDGET = 512
# A session that brings no more tokens decodes: the last that it has drawn, and drafts. The end of a prompt may be as
# short, and is then run as quickly.
DECODED_TOKENS = 16
# Tokens of a prompt in one of the blocks that a session's attention is computed in where kernels round a row otherwise
# with each number of rows. Chunks begin where blocks do, so that it never matters how a prompt was cut.
BLOCK_ROWS = 32
# Tokens of prompts in a step in which sessions decode too, unless the first chunk alone has more: they wait little.
MIXED_TOKENS = 24


def chunk_starts(begin: int, end: int, size: int) -> list[int]:
    """Where chunks of tokens `[begin, end)` of a prompt begin.

    The end of one, if it would be as short as what is decoded, and rounded so, goes with the chunk before it: a prompt
    is rounded alike in chunks of any size that is longer.
    """
    starts = list(range(begin, end, size))
    if len(starts) > 1 and end - starts[-1] <= DECODED_TOKENS < size:
        starts.pop()
    return starts


def choose_batch(
    queue: Sequence[Work], token_budget: int = TOKEN_BUDGET, mixed_tokens: int = MIXED_TOKENS
) -> list[int]:
    """Indices into `queue` (in order of arrival) of the works that form the next step; empty only if the queue is.

    Tokens are drawn first: that is short, and somebody waits for each. Otherwise the first work is among them, or one
    that decodes in its stead. Others join if they are of its kind, model and layers: those that decode, then chunks of
    prompts within the budget, one at least, so that neither can stop the other. The works of one session never
    overtake each other, and never share a step. Nothing overtakes what frees or hands on memory: the room may have been
    promised.
    """
    reach = _within_reach(queue)
    if not reach:
        return []
    eligible = [index for index in reach if _kind(queue[index]) == _kind(queue[reach[0]])]
    samples = [index for index in reach if isinstance(queue[index], SampleWork)]
    if samples and not isinstance(queue[reach[0]], CacheWork):
        eligible = [index for index in samples if _kind(queue[index]) == _kind(queue[samples[0]])]
    chosen: list[int] = []
    tokens = 0
    for index in (index for index in eligible if not _is_chunk(queue[index])):
        if not chosen or tokens + queue[index].num_tokens <= token_budget:
            chosen.append(index)
            tokens += queue[index].num_tokens
    budget = min(token_budget, tokens + mixed_tokens) if chosen else token_budget
    chunks = [index for index in eligible if _is_chunk(queue[index])]
    for index in chunks:
        if index == chunks[0] or tokens + queue[index].num_tokens <= budget:
            chosen.append(index)
            tokens += queue[index].num_tokens
    return sorted(chosen)


def _within_reach(queue: Sequence[Work]) -> list[int]:
    """Works that may run next: those before them are of other sessions, and free nothing."""
    reach: list[int] = []
    passed: set[SessionKey] = set()
    for index, work in enumerate(queue):
        keys = _session_keys(work)
        if isinstance(work, CacheWork) and not (passed.isdisjoint(keys) and _only_caches(queue, reach)):
            break
        if passed.isdisjoint(keys):
            reach.append(index)
        passed.update(keys)
    return reach


def _only_caches(queue: Sequence[Work], indices: Sequence[int]) -> bool:
    return all(isinstance(queue[index], CacheWork) for index in indices)


def _is_chunk(work: Work) -> bool:
    """Whether it brings more tokens of a session than are decoded at once: a part of a prompt."""
    return isinstance(work, ForwardWork | PromptWork) and any(
        segment.num_tokens > DECODED_TOKENS for segment in work.segments
    )


def _kind(work: Work) -> Hashable:
    match work:
        case ForwardWork() | PromptWork():
            return type(work), work.model_id, work.layers
        case SampleWork():
            return SampleWork, work.model_id
        case ScoreWork():
            return ScoreWork, work.model_id
        case FreeWork() | KeepWork() | ReuseWork():
            # Together and in order, as their room was counted.
            return CacheWork


def _session_keys(work: Work) -> tuple[SessionKey, ...]:
    match work:
        case ForwardWork() | PromptWork():
            return tuple(segment.key for segment in work.segments)
        case FreeWork():
            return work.keys
        case KeepWork():
            return (work.key,)
        case ReuseWork():
            return work.source, work.target
        case SampleWork() | ScoreWork():
            return ()
