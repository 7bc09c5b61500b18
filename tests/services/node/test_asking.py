"""What a request may ask for, over real sockets: logprobs, penalties, and to go on where a call broke off."""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from meshnet import rpc
from meshnet.errors import InvalidRequest
from meshnet.logprobs import TokenLogprobs
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from services.node.core.choices import Choice
from services.node.core.request import Emitted, FinishReason, GenerationRequest
from services.node.core.speculation import NewLimit, no_drafts
from services.node.core.work import Result, SampleWork, Sampling, ScoreWork, Work
from services.node.inference_servicer import InferenceServicer
from tests.services.node.shells import NUM_LAYERS, VOCABULARY, CountingExecutor, Shell, three_nodes
from tests.services.node.test_generation import expected, request, run, until, until_idle
from tests.services.node.test_speculation import STAGES, forced, repeating


def prompt_logprobs(prompt: tuple[int, ...], num_top: int) -> tuple[TokenLogprobs, ...]:
    """As CountingExecutor has them: of each token but the first, and of what it expects behind the one before."""
    return tuple(
        TokenLogprobs(-float(token), tuple(((before + NUM_LAYERS + i) % VOCABULARY, 0.0 - i) for i in range(num_top)))
        for before, token in itertools.pairwise(prompt)
    )


async def events_of(shell: Shell, asked: GenerationRequest) -> list[Emitted]:
    return [event async for event in shell.entry.generate(asked)]


@pytest.mark.parametrize("splits", STAGES)
@pytest.mark.parametrize("new_limit", [no_drafts, forced])
async def test_each_token_comes_with_its_logprobs(splits: Any, new_limit: NewLimit) -> None:
    async with three_nodes(splits=splits, new_limit=new_limit) as nodes:
        asked = repeating(30, top_logprobs=2)
        events = await events_of(nodes["a"], asked)
        assert [event.token_id for event in events] == expected(asked)
        assert [event.logprobs for event in events] == [
            TokenLogprobs(-float(token), ((token, 0.0), ((token + 1) % VOCABULARY, -1.0))) for token in expected(asked)
        ]
        assert all(event.logprobs is None for event in await events_of(nodes["a"], repeating(5)))
        await until_idle(nodes)


@pytest.mark.parametrize("splits", STAGES)
@pytest.mark.parametrize("prompt", [1, 2, 16, 17, 129, 1000])
async def test_a_prompt_is_scored_over_all_its_chunks(splits: Any, prompt: int) -> None:
    async with three_nodes(splits=splits) as nodes:
        asked = request(prompt, 3, top_logprobs=3, prompt_logprobs=True)
        events = await events_of(nodes["a"], asked)
        assert [event.token_id for event in events] == expected(asked)
        assert events[0].prompt_logprobs == prompt_logprobs(asked.prompt, 3)
        assert not any(event.prompt_logprobs for event in events[1:])
        await until_idle(nodes)


async def test_a_prompt_is_scored_beside_sessions_that_decode() -> None:
    async with three_nodes(kv_tokens=8192) as nodes:
        asked = [request(300 + index, 5, top_logprobs=1, prompt_logprobs=True) for index in range(4)]
        others = [request(5, 100) for _ in range(4)]
        answers, last = await asyncio.gather(
            asyncio.gather(*(run(nodes["a"], other) for other in others)),
            asyncio.gather(*(events_of(nodes["a"], one) for one in asked)),
        )
        assert answers == [expected(other) for other in others]
        assert [events[0].prompt_logprobs for events in last] == [prompt_logprobs(one.prompt, 1) for one in asked]
        await until_idle(nodes)


async def test_a_prompt_may_be_scored_and_nothing_generated() -> None:
    async with three_nodes() as nodes:
        asked = request(200, 0, prompt_logprobs=True)
        (event,) = await events_of(nodes["a"], asked)
        assert event == Emitted(None, FinishReason.LENGTH, 0, None, prompt_logprobs(asked.prompt, 0))
        await until_idle(nodes)


async def test_a_prompt_that_is_scored_reuses_no_prefix_but_leaves_one() -> None:
    async with three_nodes() as nodes:
        asked = request(300, 2, prompt_logprobs=True, top_logprobs=0)
        for _ in range(2):
            again = replace(asked, request_id=str(uuid.uuid4()))
            (first, _) = await events_of(nodes["a"], again)
            assert first.cached_tokens == 0
            assert first.prompt_logprobs == prompt_logprobs(asked.prompt, 0)
        (first, _) = await events_of(nodes["a"], replace(again, request_id=str(uuid.uuid4()), prompt_logprobs=False))
        assert first.cached_tokens == 256
        await until_idle(nodes)


@dataclass
class FailingScores(CountingExecutor):
    def _run(self, work: Work) -> Result:
        return InvalidRequest("no logits") if isinstance(work, ScoreWork) else super()._run(work)


async def test_a_prompt_that_cannot_be_scored_ends_with_the_reason() -> None:
    async with three_nodes(new_executor=FailingScores) as nodes:
        with pytest.raises(InvalidRequest, match="no logits"):
            await run(nodes["a"], request(1000, 2, prompt_logprobs=True))
        asked = request(200, 2)
        assert await run(nodes["a"], asked) == expected(asked)
        await until_idle(nodes)


@dataclass
class PlaceExecutor(CountingExecutor):
    """Text goes round, but for what hangs on the draw, on what was counted and on what is barred."""

    def _run(self, work: Work) -> Result:
        result = super()._run(work)
        if not isinstance(work, SampleWork):
            return result
        assert isinstance(result, Choice)
        token = result.token_id
        if work.uniform > 0.9:
            token += int(work.uniform * 1000) % 5
        if work.place.counted:
            times = dict(
                zip(
                    array("q", bytes(work.place.counted.token_ids)),
                    array("q", bytes(work.place.counted.times)),
                    strict=True,
                )
            )
            weight = sum((token + 1) * (1 + times[token]) for token in times)
            token += int(weight % 11 == 0)
        while token % VOCABULARY in work.place.barred:
            token += 1
        return Choice(token % VOCABULARY)


PENALIZED = Sampling(1.0, repetition_penalty=1.2, frequency_penalty=0.3)


@pytest.mark.parametrize("splits", STAGES[1:])
@pytest.mark.parametrize("sampling", [Sampling(1.0), PENALIZED])
async def test_drafts_change_nothing_where_choices_hang_on_the_text(splits: Any, sampling: Sampling) -> None:
    stops = frozenset({4, 52, 76})
    asked = [repeating(90, i, sampling=sampling, seed=i, stop_token_ids=stops, min_new_tokens=60) for i in range(6)]
    async with three_nodes(splits=splits, new_executor=PlaceExecutor, kv_tokens=8192) as nodes:
        plain = await asyncio.gather(*(run(nodes["a"], one) for one in asked))
    assert len({tuple(tokens) for tokens in plain}) == 6
    assert all(not stops & set(tokens[:59]) and len(tokens) >= 60 for tokens in plain)
    assert any(stops & set(tokens) for tokens in plain)
    async with three_nodes(splits=splits, new_executor=PlaceExecutor, new_limit=forced, kv_tokens=8192) as nodes:
        assert await asyncio.gather(*(run(nodes["a"], one) for one in asked)) == plain
        counts = nodes["a"].entry.draft_counts
        assert 0 < counts.accepted < counts.drafted
        await until_idle(nodes)


@pytest.mark.parametrize("new_limit", [no_drafts, forced])
async def test_a_generation_that_was_cut_anywhere_goes_on_as_if_it_had_not_been(new_limit: NewLimit) -> None:
    new = 40
    asked = repeating(
        new, sampling=PENALIZED, seed=7, stop_token_ids=frozenset({4, 52}), min_new_tokens=30, top_logprobs=1
    )
    async with three_nodes(new_executor=PlaceExecutor, new_limit=new_limit, kv_tokens=4096) as nodes:
        whole = await run(nodes["a"], asked)
        assert len(whole) > 30
        for cut in range(1, len(whole)):
            rest = replace(
                asked,
                request_id=str(uuid.uuid4()),
                prompt=(*asked.prompt, *whole[:cut]),
                max_new_tokens=new - cut,
                num_generated=cut,
            )
            assert whole[:cut] + await run(nodes["a"], rest) == whole
        await until_idle(nodes)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "at least 1, or 0 with prompt_logprobs"),
    ({"min_new_tokens": 6}, "min_new_tokens 6"),
    ({"min_new_tokens": 9, "num_generated": 2}, "min_new_tokens 9"),
    ({"num_generated": 3}, "num_generated 3"),
    ({"top_logprobs": 21}, "top_logprobs 21"),
    *[({"sampling": Sampling(min_p=value)}, "min_p") for value in (-0.1, 1.1, math.nan)],
    *[({"sampling": Sampling(presence_penalty=v)}, "presence_penalty") for v in (-2.1, 2.1, math.nan, math.inf)],
    *[({"sampling": Sampling(frequency_penalty=v)}, "frequency_penalty") for v in (-2.1, 2.1, math.nan)],
    *[({"sampling": Sampling(repetition_penalty=v)}, "repetition_penalty") for v in (-1.0, 0.0, math.nan, math.inf)],
    *[({"sampling": Sampling(logit_bias=((5, v),))}, "logit_bias .* token id 5") for v in (-101.0, 100.5, math.nan)],
    ({"sampling": Sampling(logit_bias=((5, 1.0), (100, 1.0)))}, "logit_bias of token id 100"),
    ({"sampling": Sampling(temperature=math.inf)}, "temperature"),
    ({"sampling": Sampling(top_p=math.nan)}, "top_p"),
]


async def test_what_is_out_of_range_is_refused_by_name() -> None:
    async with three_nodes(kv_tokens=512) as nodes:
        for changes, said in BAD:
            with pytest.raises(InvalidRequest, match=said):
                await run(nodes["a"], replace(request(), **changes))
        at_the_edge = Sampling(0.0, 0, 1.0, 1.0, -2.0, 2.0, 0.01, ((0, -100.0), (99, 100.0)))
        edge: dict[str, Any] = {"sampling": at_the_edge, "top_logprobs": 20, "num_generated": 2, "min_new_tokens": 7}
        assert len(await run(nodes["a"], request(**edge))) == 5
        await until_idle(nodes)


@pytest.fixture
async def served() -> AsyncIterator[tuple[dict[str, Shell], inference_pb2_grpc.InferenceStub]]:
    async with three_nodes() as nodes:
        server = rpc.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(nodes["a"].entry), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield nodes, inference_pb2_grpc.InferenceStub(channel)
        await server.stop(None)
        await until(lambda: nodes["a"].entry.num_running == 0)


def message(**more: Any) -> inference_pb2.GenerateRequest:
    fields: dict[str, Any] = {"prompt_token_ids": [0, 1, 2], "max_new_tokens": 3, **more}
    return inference_pb2.GenerateRequest(request_id=str(uuid.uuid4()), model_id="m", **fields)


async def test_all_that_is_asked_for_reaches_the_choice_of_a_token(served: Any) -> None:
    nodes, stub = served
    seen: list[SampleWork] = []
    once = nodes["a"].executor._run

    def watched(work: Work) -> Result:
        seen.extend([work] if isinstance(work, SampleWork) else [])
        return once(work)  # type: ignore[no-any-return]

    nodes["a"].executor._run = watched
    sampling = inference_pb2.SamplingParams(
        temperature=0.5, top_k=7, min_p=0.25, presence_penalty=1.5, frequency_penalty=-0.5, repetition_penalty=1.25,
        logit_bias={9: -1.5, 4: 2.0}, min_new_tokens=3, seed=5,
    )  # fmt: skip
    asked = message(sampling=sampling, stop_token_ids=[14], top_logprobs=2, prompt_logprobs=True, num_generated=1)
    events = [event async for event in stub.Generate(asked)]
    assert seen[0].sampling == Sampling(0.5, 7, 1.0, 0.25, 1.5, -0.5, 1.25, ((4, 2.0), (9, -1.5)))
    assert [work.place.barred for work in seen] == [(14,), (14,)][: len(events)]
    assert [event.token_id for event in events] == [14]
    assert events[0].logprobs == inference_pb2.TokenLogprobs(
        logprob=-14.0, top_token_ids=[14, 15], top_logprobs=[0.0, -1.0]
    )
    assert [one.logprob for one in events[0].prompt_logprobs] == [-1.0, -2.0]
    assert [list(one.top_token_ids) for one in events[0].prompt_logprobs] == [[12, 13], [13, 14]]


async def test_what_is_unset_on_the_wire_changes_nothing(served: Any) -> None:
    _, stub = served
    events = [event async for event in stub.Generate(message())]
    assert [event.token_id for event in events] == [14, 26, 38]
    assert not any(event.HasField("logprobs") or event.prompt_logprobs for event in events)
    (event,) = [event async for event in stub.Generate(message(max_new_tokens=0, prompt_logprobs=True))]
    assert not event.HasField("token_id")
    assert event.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert len(event.prompt_logprobs) == 2
