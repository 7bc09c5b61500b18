"""What is drawn, over the seeds of thousands of requests, is what transformers would draw from the same logits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import nn

from meshnet.errors import MeshnetError
from services.node.core.history import History
from services.node.core.request import GenerationRequest
from services.node.core.work import SampleWork, Sampling
from services.node.engine.choosing import draw
from services.node.engine.shard import Entry
from tests.services.node.engine.test_processors import GENERATED, PROMPT, STOP, VOCAB, logits_of, of_transformers

NUM_DRAWS = 3000
# Draws come from seeds, so a test that passes always does. A right sampler's would fail one run of ten thousand seeds.
LEAST_PROBABILITY = 1e-4
PLAIN = Sampling(1.0)
CASES = {
    "plain": PLAIN,
    "cold": Sampling(0.6),
    "hot": Sampling(1.7),
    "top_k": Sampling(1.0, top_k=40),
    "top_p": Sampling(1.0, top_p=0.8),
    "min_p": Sampling(1.0, min_p=0.02),
    "repetition": Sampling(1.0, repetition_penalty=1.5),
    "repetition under 1": Sampling(1.0, repetition_penalty=0.7),
    "presence": Sampling(1.0, presence_penalty=2.0),
    "frequency": Sampling(1.0, frequency_penalty=-1.5),
    "bias": Sampling(1.0, logit_bias=((3, 4.0), (40, -100.0))),
    "all": Sampling(1.3, 60, 0.95, 0.01, repetition_penalty=1.2, logit_bias=((3, 4.0),)),
}


def likely_again() -> torch.Tensor:
    """Logits with which it shows how tokens of the text are treated: some of them are among the likeliest."""
    logits = logits_of(1) / 2
    token_ids = sorted({*GENERATED, *PROMPT[::3], 40})
    logits[token_ids] = logits.max() - torch.linspace(0, 2, len(token_ids))
    return logits


def entry_of(logits: torch.Tensor) -> Entry:
    """An entry whose head makes these logits of a one."""
    head = nn.Linear(1, len(logits), bias=False)
    head.weight = nn.Parameter(logits[:, None].clone())
    return Entry(nn.Identity(), None, nn.Identity(), head, torch.float32)


def drawn(logits: torch.Tensor, sampling: Sampling, min_new_tokens: int = 0) -> list[int]:
    """The next token of as many requests, which differ in their seeds only."""
    works = []
    for seed in range(NUM_DRAWS):
        request = GenerationRequest(
            request_id=str(seed),
            model_id="m",
            prompt=(*PROMPT, *GENERATED),
            max_new_tokens=1,
            sampling=sampling,
            seed=seed,
            stop_token_ids=frozenset(STOP),
            min_new_tokens=min_new_tokens,
            num_generated=len(GENERATED),
        )
        history = History(request, random.Random(request.seed))
        (uniform,), (place,) = history.uniforms(1), history.places(())
        works.append(SampleWork("m", b"", sampling, uniform, place))
    with torch.inference_mode():
        choices = draw(entry_of(logits), torch.ones(NUM_DRAWS, 1), works)
    return [choice.token_id for choice in choices if not isinstance(choice, MeshnetError)]


def expected(logits: torch.Tensor, sampling: Sampling, barred: tuple[int, ...] = ()) -> torch.Tensor:
    """Probabilities, by transformers' processors; presence and frequency penalties, which it has not, by their
    definition."""
    logits = logits.clone()
    for token, times in Counter(GENERATED).items():
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * times
    scores = of_transformers(sampling, logits, barred)
    return scores.double().softmax(-1)


def probability(tokens: list[int], probabilities: torch.Tensor) -> float:
    """Of draws that are as far off or further (Pearson's chi-square). Zero if one is drawn that cannot be."""
    assert len(tokens) == NUM_DRAWS
    seen = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    wanted = NUM_DRAWS * probabilities
    if bool(seen[wanted == 0].sum()):
        return 0.0
    often = wanted >= 5
    cells = torch.cat([seen[often], seen[~often].sum()[None]]), torch.cat([wanted[often], wanted[~often].sum()[None]])
    filled = cells[1] > 1e-9
    statistic = ((cells[0] - cells[1])[filled] ** 2 / cells[1][filled]).sum()
    freedom = filled.sum() - 1
    assert freedom > 10
    return float(torch.special.gammaincc(freedom / 2.0, statistic / 2))


@pytest.mark.parametrize("name", CASES)
def test_draws_are_those_of_transformers(name: str) -> None:
    logits, sampling = likely_again(), CASES[name]
    tokens = drawn(logits, sampling)
    assert probability(tokens, expected(logits, sampling)) > LEAST_PROBABILITY
    if sampling is not PLAIN:
        assert probability(tokens, expected(logits, PLAIN)) < 1e-9, "the test would see that nothing was done"


def test_stop_tokens_are_not_drawn_before_their_time() -> None:
    logits = likely_again()
    logits[list(STOP)] = logits.max()
    early = drawn(logits, PLAIN, min_new_tokens=len(GENERATED) + 1)
    assert probability(early, expected(logits, PLAIN, STOP)) > LEAST_PROBABILITY
    late = drawn(logits, PLAIN, min_new_tokens=len(GENERATED))
    assert probability(late, expected(logits, PLAIN)) > LEAST_PROBABILITY
    assert set(STOP) <= set(late)
