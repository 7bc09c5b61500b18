"""Drafts over real sockets: what is generated is what is generated without, and less often asked for."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from meshnet.errors import PositionMismatch
from services.node.core.choices import Choice
from services.node.core.request import FinishReason, GenerationRequest
from services.node.core.speculation import DraftCounts, FixedLimit, MeasuredLimit
from services.node.core.work import PromptWork, Result, SampleWork, Sampling, Work
from tests.services.node.shells import VOCABULARY, CountingExecutor, three_nodes
from tests.services.node.test_generation import expected, request, run, until_idle
from tests.services.node.test_lanes import frames_at

STAGES: tuple[Mapping[str, tuple[int, int]], ...] = (
    {"a": (0, 12)},
    {"a": (0, 5), "b": (5, 12)},
    {"a": (0, 4), "b": (4, 8), "c": (8, 12)},
)
DRAFTED = 7


def forced() -> FixedLimit:
    return FixedLimit(DRAFTED)


@dataclass
class DrawingExecutor(CountingExecutor):
    """Draws so that text repeats itself mostly, and each draw shows: one in eight is one of another token."""

    def _run(self, work: Work) -> Result:
        result = super()._run(work)
        if isinstance(work, SampleWork) and work.sampling.temperature:
            assert isinstance(result, Choice)
            shift = int(work.uniform * 1000) % 5 * (work.uniform > 0.875)
            return Choice((result.token_id + shift) % VOCABULARY)
        return result


def repeating(new: int, start: int = 0, **more: Any) -> GenerationRequest:
    """A prompt in which the text goes round once and a half, so that all that follows can be known."""
    tokens = tuple((start + 12 * index) % VOCABULARY for index in range(40))
    return GenerationRequest(str(uuid.uuid4()), "m", tokens, new, **more)


def again(asked: GenerationRequest) -> GenerationRequest:
    return replace(asked, request_id=str(uuid.uuid4()))


@pytest.mark.parametrize("splits", STAGES)
@pytest.mark.parametrize("num_sessions", [1, 8])
async def test_drafts_change_no_token_and_spare_most_steps(
    splits: Mapping[str, tuple[int, int]], num_sessions: int
) -> None:
    async with three_nodes(splits=splits, new_limit=forced, kv_tokens=8192) as nodes:
        asked = [repeating(100, start) for start in range(num_sessions)]
        assert await asyncio.gather(*(run(nodes["a"], one) for one in asked)) == [expected(one) for one in asked]
        counts = nodes["a"].entry.draft_counts
        assert counts.accepted == counts.drafted > 0
        # One before the first step, then eight a step.
        assert counts.steps == num_sessions * (1 + -(-99 // 8))
        await until_idle(nodes)


@pytest.mark.parametrize("splits", STAGES)
async def test_seeded_draws_are_the_same_with_drafts_and_without(splits: Mapping[str, tuple[int, int]]) -> None:
    sampling = Sampling(temperature=1.0)
    asked = [repeating(90, seed, sampling=sampling, seed=seed) for seed in range(8)]
    async with three_nodes(splits=splits, new_executor=DrawingExecutor, kv_tokens=8192) as nodes:
        plain = await asyncio.gather(*(run(nodes["a"], one) for one in asked))
        assert nodes["a"].entry.draft_counts == DraftCounts(8 * 90, 0, 0)
    assert len({tuple(tokens) for tokens in plain}) == 8
    async with three_nodes(splits=splits, new_executor=DrawingExecutor, kv_tokens=8192, new_limit=forced) as nodes:
        assert await asyncio.gather(*(run(nodes["a"], again(one)) for one in asked)) == plain
        assert [await run(nodes["a"], again(one)) for one in asked[:2]] == plain[:2]
        counts = nodes["a"].entry.draft_counts
        assert 0 < counts.accepted < counts.drafted, "some are right and some are wrong"
        await until_idle(nodes)


async def test_a_stop_token_among_accepted_drafts_ends_it_there() -> None:
    async with three_nodes(new_limit=forced) as nodes:
        for stops_after in range(1, 12):
            asked = repeating(50)
            tokens = expected(asked)
            asked = replace(asked, stop_token_ids=frozenset({tokens[stops_after - 1]}))
            events = [event async for event in nodes["a"].entry.generate(asked)]
            assert [event.token_id for event in events] == tokens[:stops_after]
            assert [event.finish_reason for event in events] == [None] * (stops_after - 1) + [FinishReason.STOP]
        await until_idle(nodes)


@pytest.mark.parametrize("new", [1, 2, 3, 8, 9, 10, 17])
async def test_no_more_is_drafted_than_may_be_emitted(new: int) -> None:
    """The KV caches have room for the prompt and the new tokens, to the token: here that is a block."""
    async with three_nodes(new_limit=forced, kv_tokens=128) as nodes:
        seen = frames_at(nodes["b"])
        asked = replace(repeating(new), prompt=tuple(12 * index % VOCABULARY for index in range(128 - new)))
        events = [event async for event in nodes["a"].entry.generate(asked)]
        assert [event.token_id for event in events] == expected(asked)
        assert [event.finish_reason for event in events][-1] is FinishReason.LENGTH
        assert max((frame.cached or (0,))[0] + frame.positions for frame in seen) < 128
        await until_idle(nodes)


async def test_where_nothing_is_repeated_nothing_is_drafted() -> None:
    async with three_nodes(new_limit=forced) as nodes:
        asked = request(1, 24)
        assert await run(nodes["a"], asked) == expected(asked)
        assert nodes["a"].entry.draft_counts == DraftCounts(24, 0, 0)


@dataclass
class NoisyExecutor(CountingExecutor):
    """Draws any token, whatever was said before."""

    def _run(self, work: Work) -> Result:
        return Choice(int(work.uniform * VOCABULARY)) if isinstance(work, SampleWork) else super()._run(work)


async def test_random_text_is_hardly_guessed_at() -> None:
    asked = request(20, 400, seed=5)
    async with three_nodes(new_executor=NoisyExecutor) as nodes:
        plain = await run(nodes["a"], asked)
    async with three_nodes(new_limit=MeasuredLimit, new_executor=NoisyExecutor) as nodes:
        assert await run(nodes["a"], again(asked)) == plain
        # Of so many tokens ten pairs or so stood there before.
        assert nodes["a"].entry.draft_counts.drafted < 200
        await until_idle(nodes)


async def test_what_repeats_itself_is_guessed_when_that_has_been_measured() -> None:
    async with three_nodes(new_limit=MeasuredLimit) as nodes:
        asked = repeating(400)
        assert await run(nodes["a"], asked) == expected(asked)
        assert nodes["a"].entry.draft_counts.accepted > 100
        await until_idle(nodes)


@pytest.mark.parametrize("where", ["a", "b", "c"])
async def test_rows_with_drafts_that_fail_go_on_and_take_none_of_those_beside_with_them(where: str) -> None:
    async with three_nodes(new_limit=forced, kv_tokens=8192) as nodes:
        victim, *others = [repeating(60, start) for start in range(6)]
        executor = nodes[where].executor
        once: Callable[[Work], Result] = executor._run

        def fails(work: Work) -> Result:
            segments = getattr(work, "segments", ())
            if segments and segments[0].key.session == victim.request_id and segments[0].position >= 60:
                return PositionMismatch("its cache is gone", 0)
            return once(work)

        executor._run = fails  # type: ignore[method-assign]
        answers = await asyncio.gather(*(run(nodes["a"], one) for one in (victim, *others)))
        assert answers == [expected(one) for one in (victim, *others)]
        await until_idle(nodes)


async def test_sessions_with_drafts_and_without_share_steps() -> None:
    """Two lengths are two frames on the wire, side by side, and one step at the entry node."""
    async with three_nodes(new_limit=forced, kv_tokens=8192) as nodes:
        asked = [one for start in range(4) for one in (repeating(60, start), request(1, 24))]
        works: list[list[int]] = []
        once = nodes["a"].executor.run

        def watched(batch: Any) -> list[Result]:
            works.append([work.num_tokens for work in batch if isinstance(work, PromptWork)])
            return once(batch)

        nodes["a"].executor.run = watched  # type: ignore[method-assign]
        assert await asyncio.gather(*(run(nodes["a"], one) for one in asked)) == [expected(one) for one in asked]
        assert any({1, 1 + DRAFTED} <= set(lengths) for lengths in works)
        await until_idle(nodes)
