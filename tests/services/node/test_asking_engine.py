"""What a request may ask for, with torch behind the sockets, against transformers' generate() and its probabilities."""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshnet.logprobs import TokenLogprobs
from meshnet.model import Quantization
from meshnet.model_files import ModelFiles
from services.node.core.request import GenerationRequest
from services.node.core.speculation import FixedLimit, NewLimit, no_drafts
from services.node.core.work import Sampling
from tests.e2e.tiny import VOCAB_SIZE, save_tiny_llama
from tests.oracle import log_probabilities
from tests.parity import TOLERATED_STEPS, Reference, gap_in_steps
from tests.services.node.test_asking import events_of
from tests.services.node.test_generation import run
from tests.services.node.torch_nodes import MODEL, torch_nodes

SPLITS = ((), (3,), (2, 4))
# Between nodes hidden states are bfloat16, also where nodes compute in float32.
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(MODEL, save_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def repeating_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A model that likes to repeat tokens, so that drafts are right now and then."""
    return ModelFiles(MODEL, save_tiny_llama(tmp_path_factory.mktemp("repeating"), initializer_range=0.05))


def forced() -> FixedLimit:
    return FixedLimit(3)


def words(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB_SIZE) for _ in range(length))


def asked_of(prompt: tuple[int, ...], new: int, **more: Any) -> GenerationRequest:
    return GenerationRequest(str(uuid.uuid4()), MODEL, prompt, new, **more)


def check_greedy(reference: Reference, asked: GenerationRequest, tokens: list[int]) -> int:
    """Tokens are those that generate() finds, up to the first whose scores are as good as equal. Returns how many."""
    sampling = asked.sampling
    bias = [[[token], value] for token, value in sampling.logit_bias]
    found = reference.model.generate(
        torch.tensor([asked.prompt]),
        max_new_tokens=asked.max_new_tokens,
        min_new_tokens=asked.min_new_tokens or None,
        eos_token_id=sorted(asked.stop_token_ids) or None,
        repetition_penalty=sampling.repetition_penalty,
        sequence_bias=bias or None,
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    expected = found.sequences[0, len(asked.prompt) :].tolist()
    for index, (token, scores) in enumerate(zip(tokens, found.scores, strict=False)):
        if token != expected[index]:
            # A penalty below one moves scores apart, and with them what was rounded.
            assert gap_in_steps(scores[0], token) <= TOLERATED_STEPS / min(1.0, sampling.repetition_penalty)
            return index
    assert tokens == expected
    return len(tokens)


WAYS: dict[str, dict[str, Any]] = {
    "repetition": {"sampling": Sampling(repetition_penalty=1.4)},
    "bias": {"sampling": Sampling(logit_bias=tuple((token, 3.0 if token % 2 else -3.0) for token in range(0, 500, 5)))},
    "both": {"sampling": Sampling(repetition_penalty=1.2, logit_bias=((3, 8.0), (250, -100.0)))},
    "stops": {"stop_token_ids": frozenset(range(0, VOCAB_SIZE, 3)), "min_new_tokens": 12},
    "all": {
        "sampling": Sampling(repetition_penalty=0.7, logit_bias=((6, 9.0), (9, 4.0))),
        "stop_token_ids": frozenset(range(0, VOCAB_SIZE, 3)),
        "min_new_tokens": 20,
    },
}


@pytest.mark.parametrize("new_limit", [no_drafts, forced])
@pytest.mark.parametrize("way", WAYS)
async def test_greedy_tokens_are_those_of_generate(files: ModelFiles, way: str, new_limit: NewLimit) -> None:
    reference = Reference(files.path)
    asked = [asked_of(words(seed, 5 + 40 * seed), 24, **WAYS[way]) for seed in range(4)]
    plain = [asked_of(one.prompt, 24) for one in asked]
    async with torch_nodes(files, (3,), new_limit) as nodes:
        found = await asyncio.gather(*(run(nodes[0], one) for one in asked))
        without = await asyncio.gather(*(run(nodes[0], one) for one in plain))
    assert found != without, "it matters what is asked for"
    compared = sum(check_greedy(reference, one, tokens) for one, tokens in zip(asked, found, strict=True))
    assert compared > sum(map(len, found)) / 2


def check_logprobs(found: list[TokenLogprobs], logits: torch.Tensor, targets: list[int], num_top: int) -> None:
    """Of `[targets, vocab]` reference logits."""
    expected = log_probabilities(logits, targets)
    everything = logits.float().log_softmax(-1)
    for row, one in enumerate(found):
        assert one.logprob == pytest.approx(float(expected[row]), abs=TOLERANCE)
        assert len(one.top) == num_top
        values = [value for _, value in one.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx([float(everything[row, token]) for token, _ in one.top], abs=TOLERANCE)
        assert values == pytest.approx(everything[row].topk(num_top).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("ends", SPLITS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, repetition_penalty=1.3, logit_bias=((5, 20.0),))])
async def test_logprobs_of_prompt_and_tokens_are_those_of_the_unsharded_model(
    files: ModelFiles, ends: tuple[int, ...], sampling: Sampling
) -> None:
    """Over several chunks, whatever changes the choice."""
    reference = Reference(files.path, torch.float32)
    asked = asked_of(words(9, 300), 20, sampling=sampling, seed=1, top_logprobs=5, prompt_logprobs=True)
    async with torch_nodes(files, ends, forced, quantization=Quantization.FLOAT32) as nodes:
        events = await events_of(nodes[0], asked)
        (alone,) = await events_of(
            nodes[0], replace(asked, request_id=str(uuid.uuid4()), max_new_tokens=0, top_logprobs=20)
        )
    tokens = [event.token_id for event in events if event.token_id is not None]
    text = [*asked.prompt, *tokens]
    logits = reference.logits(text)[:-1]
    num_prompt = len(asked.prompt)
    check_logprobs(list(events[0].prompt_logprobs), logits[: num_prompt - 1], text[1:num_prompt], 5)
    check_logprobs(
        [event.logprobs for event in events if event.logprobs], logits[num_prompt - 1 :], text[num_prompt:], 5
    )
    assert len(tokens) == len([event for event in events if event.logprobs]) == 20
    check_logprobs(list(alone.prompt_logprobs), logits[: num_prompt - 1], text[1:num_prompt], 20)
    assert [one.top[:5] for one in alone.prompt_logprobs] == [one.top for one in events[0].prompt_logprobs]


ALL_AT_ONCE = Sampling(0.6, 40, 0.98, 0.001, 0.3, 0.2, 1.1, ((5, 1.0),))


@pytest.mark.parametrize("ends", SPLITS)
async def test_drafts_change_no_token_with_penalties(repeating_files: ModelFiles, ends: tuple[int, ...]) -> None:
    asked = [
        asked_of(tuple(range(30 * seed, 30 * seed + 9)) * 4, 24, sampling=sampling, seed=seed, **stops)
        for seed in range(4)
        for sampling in (Sampling(frequency_penalty=0.05, repetition_penalty=1.01), ALL_AT_ONCE)
        for stops in ({"min_new_tokens": 12, "stop_token_ids": frozenset(range(0, VOCAB_SIZE, 4))},)
    ]
    async with torch_nodes(repeating_files, ends, no_drafts) as nodes:
        plain = await asyncio.gather(*(run(nodes[0], one) for one in asked))
    async with torch_nodes(repeating_files, ends, forced) as nodes:
        assert await asyncio.gather(*(run(nodes[0], one) for one in asked)) == plain
        counts = nodes[0].entry.draft_counts
        assert 0 < counts.accepted < counts.drafted


@pytest.mark.parametrize("new_limit", [no_drafts, forced])
@pytest.mark.parametrize("length", [20, 300])
@pytest.mark.parametrize("ends", SPLITS)
async def test_a_seeded_generation_goes_on_where_it_was_cut(
    files: ModelFiles, ends: tuple[int, ...], length: int, new_limit: NewLimit
) -> None:
    """In bfloat16: to the bit, though what was decoded is now a part of the prompt."""
    new = 24
    sampling = replace(ALL_AT_ONCE, temperature=0.9)
    asked = asked_of(words(length, length), new, sampling=sampling, seed=11, min_new_tokens=4)
    async with torch_nodes(files, ends, new_limit) as nodes:
        whole = await run(nodes[0], asked)
        for cut in range(1, new):
            prompt = (*asked.prompt, *whole[:cut])
            rest = replace(
                asked, request_id=str(uuid.uuid4()), prompt=prompt, max_new_tokens=new - cut, num_generated=cut
            )
            assert whole[:cut] + await run(nodes[0], rest) == whole
