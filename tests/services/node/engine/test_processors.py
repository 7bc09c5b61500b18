"""What tokens are drawn from, against transformers' own processors, and against a full sort of the vocabulary."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from meshnet.errors import InvalidRequest
from services.node.core.choices import Counted, Place
from services.node.core.history import TokenCounts
from services.node.core.work import Sampling
from services.node.engine.logits import processed, token_logprobs
from services.node.engine.sampling import choose, distribution

VOCAB = 1000
PROMPT, GENERATED = tuple(range(0, 60, 2)), (3, 4, 4, 4, 90, 3, 91)
STOP = (7, 12)
PLACES = (Place(), Place(barred=STOP))


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """No two are equal: transformers leaves open which of equals it keeps."""
    return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def counted(prompt: tuple[int, ...] = PROMPT, generated: tuple[int, ...] = GENERATED) -> Counted:
    return TokenCounts(prompt, generated).counted()


def of_transformers(sampling: Sampling, logits: torch.Tensor, barred: tuple[int, ...] = ()) -> torch.Tensor:
    """As generate() would make its list: those that change nothing are left out."""
    found: list[Any] = []
    if sampling.logit_bias:
        bias = [[[token], value] for token, value in sampling.logit_bias]
        found.append(SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if barred:
        found.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), len(GENERATED) + 1, list(barred)))
    if sampling.temperature:
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    tokens = torch.tensor([[*PROMPT, *GENERATED]])
    scores: torch.Tensor = LogitsProcessorList(found)(tokens, logits[None].clone())[0]
    return scores


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("repetition_penalty", [0.8, 1.0, 1.3])
@pytest.mark.parametrize("bias", [(), ((3, 5.0), (7, 100.0), (40, -2.5), (999, 0.25))])
def test_logits_are_processed_as_transformers_does(
    place: Place, repetition_penalty: float, bias: tuple[tuple[int, float], ...]
) -> None:
    sampling = Sampling(repetition_penalty=repetition_penalty, logit_bias=bias)
    place = Place(counted() if sampling.has_penalties else None, place.barred)
    for seed in range(5):
        logits = logits_of(seed)
        assert torch.equal(processed(logits, sampling, place), of_transformers(sampling, logits, place.barred))
        assert torch.equal(logits, logits_of(seed)), "the model's own stay as they are"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("top_k", [0, 1, 30, 5000])
@pytest.mark.parametrize("top_p", [0.1, 0.85, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    more: tuple[dict[str, Any], ...] = ({}, {"repetition_penalty": 1.3, "logit_bias": ((3, 5.0), (40, -2.5))})
    for seed, (place, changes) in enumerate(itertools.product(PLACES, more)):
        sampling = Sampling(temperature, top_k, top_p, min_p, **changes)
        place = Place(counted() if changes else None, place.barred)
        logits = logits_of(seed)
        scores = of_transformers(sampling, logits, place.barred)
        expected = scores.double().softmax(-1)
        ids, probabilities = distribution(logits, sampling, place)
        found = torch.zeros(VOCAB, dtype=torch.float64)
        found[ids] = probabilities
        assert set(ids.tolist()) == set(torch.nonzero(scores > -torch.inf)[:, 0].tolist())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_presence_and_frequency_count_what_was_generated() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    logits, expected = logits_of(0), logits_of(0)
    for token, times in Counter(GENERATED).items():
        expected[token] -= 0.5 + 0.25 * times
    assert torch.equal(processed(logits, sampling, Place(counted())), expected)
    repeated = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    for token in {*PROMPT, *GENERATED}:
        value, times = float(logits[token]), GENERATED.count(token)
        expected[token] = (2 * value if value < 0 else value / 2) - (0.5 * (times > 0) + 0.25 * times)
    torch.testing.assert_close(processed(logits, repeated, Place(counted())), expected, rtol=0, atol=1e-6)


def mask_of(allowed: set[int], vocab: int = VOCAB) -> bytes:
    words = array("I", bytes(4 * -(-vocab // 32)))
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return words.tobytes()


@pytest.mark.parametrize("vocab", [31, 32, 33, 1000])
def test_what_a_mask_does_not_allow_is_never_chosen(vocab: int) -> None:
    allowed = {0, 17, vocab - 1}
    place = Place(allowed=mask_of(allowed, vocab))
    logits = logits_of(1, vocab)
    scores = processed(logits, Sampling(logit_bias=((5, 100.0),)), place)
    assert {token for token in range(vocab) if scores[token] > -math.inf} == allowed
    assert choose(logits, Sampling(), 0.0, place) == max(allowed, key=lambda token: float(logits[token]))
    for sampling in (Sampling(3.0), Sampling(3.0, top_k=20), Sampling(3.0, top_p=0.9999999, min_p=1e-9)):
        drawn = {choose(logits, sampling, uniform, place) for uniform in (0.0, 0.3, 0.6, 0.9, math.nextafter(1.0, 0))}
        assert drawn <= allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_left_there_is_an_error_that_says_so(temperature: float) -> None:
    nothing = (
        Place(allowed=mask_of(set())),
        Place(allowed=mask_of({5}), barred=(5,)),
        Place(barred=tuple(range(VOCAB + 3))),
    )
    for place in nothing:
        with pytest.raises(InvalidRequest, match="no token that may be chosen"):
            choose(logits_of(0), Sampling(temperature), 0.5, place)
    with pytest.raises(InvalidRequest, match="mask of 3 bytes"):
        choose(logits_of(0), Sampling(temperature), 0.5, Place(allowed=b"abc"))


def sorted_choice(logits: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """The choice from a full sort, as plain as it can be."""
    scaled = (logits.float() - logits.float().max()) / sampling.temperature
    values, ids = torch.sort(scaled, descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    shares = torch.softmax(values.double(), dim=-1).cumsum(dim=-1)
    kept = int(torch.searchsorted(shares, sampling.top_p)) + 1 if sampling.top_p < 1 else len(shares)
    if sampling.min_p:
        kept = min(kept, int((values >= math.log(sampling.min_p)).sum()))
    drawn = int(torch.searchsorted(shares[:kept], uniform * float(shares[kept - 1]), right=True))
    return int(ids[min(drawn, kept - 1)])


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_what_is_not_sorted_changes_no_draw(spread: float, temperature: float) -> None:
    """In bfloat16, where many are equal, with draws among the likeliest and among the least likely."""
    draw = random.Random(3)
    logits = (spread * logits_of(0, 20000)).bfloat16()
    for more in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.99999}, {"min_p": 0.01}, {"top_k": 700, "min_p": 1e-6}):
        sampling = Sampling(temperature, **more)
        for uniform in [*(draw.random() for _ in range(12)), 0.0, 0.99999, 1 - 1e-9]:
            assert choose(logits, sampling, uniform) == sorted_choice(logits, sampling, uniform)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_are_those_of_the_model(dtype: torch.dtype, num_top: int) -> None:
    logits = logits_of(2).to(dtype)
    expected = logits.float().log_softmax(-1)
    order = sorted(range(VOCAB), key=lambda token: (-float(logits[token]), token))[:num_top]
    for token in (0, 500, 999):
        found = token_logprobs(logits, token, num_top)
        assert found.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert [top for top, _ in found.top] == order
        assert [value for _, value in found.top] == pytest.approx([float(expected[top]) for top in order], abs=1e-5)
    even = token_logprobs(torch.zeros(64), 63, 3)
    assert [top for top, _ in even.top] == [0, 1, 2]
    with pytest.raises(InvalidRequest):
        token_logprobs(torch.tensor([1.0, math.nan]), 0, 1)
