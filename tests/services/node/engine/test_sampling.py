"""The choice of a token, against a plain reading of its definition."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InvalidRequest
from services.node.core.work import Sampling
from services.node.engine.sampling import choose

# Multiples of a half, so that equals are common.
LOGITS = st.lists(st.integers(-12, 12).map(lambda half: half / 2), min_size=1, max_size=40)


def plain_choice(logits: list[float], sampling: Sampling, uniform: float) -> set[int]:
    """All ids that rounding may make of the draw."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: sampling.top_k or len(order)]
    largest = logits[order[0]]
    shares = [math.exp((logits[token] - largest) / sampling.temperature) for token in order]
    total = sum(shares)
    kept, reached = 0, 0.0
    while kept < len(order) and (reached < sampling.top_p - 1e-9 or kept == 0):
        reached += shares[kept] / total
        kept += 1
    found: set[int] = set()
    for draw in (uniform - 1e-6, uniform, uniform + 1e-6):
        passed = 0.0
        for token, share in zip(order[:kept], shares, strict=False):
            passed += share / total / reached
            if passed > draw:
                found.add(token)
                break
        else:
            found.add(order[kept - 1])
    return found


@given(
    logits=LOGITS,
    temperature=st.floats(0.1, 5.0),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.313, 0.777, 0.97, 1.0]),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_draws_follow_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, uniform: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    assert choose(torch.tensor(logits).bfloat16(), sampling, uniform) in plain_choice(logits, sampling, uniform)


@given(logits=LOGITS)
def test_greedy_takes_the_first_of_the_largest(logits: list[float]) -> None:
    assert choose(torch.tensor(logits).bfloat16(), Sampling(), 0.9) == logits.index(max(logits))


@given(logits=LOGITS, uniform=st.floats(0.0, 1.0, exclude_max=True))
def test_the_narrowest_sampling_is_greedy(logits: list[float], uniform: float) -> None:
    row = torch.tensor(logits)
    greedy = choose(row, Sampling(), 0.0)
    assert choose(row, Sampling(1.0, top_k=1), uniform) == greedy
    assert choose(row, Sampling(1.0, top_p=1e-9), uniform) == greedy


def test_even_draws_give_each_token_its_share() -> None:
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    drawn = Counter(choose(logits, Sampling(1.0), (index + 0.5) / 1000) for index in range(1000))
    assert dict(drawn) == pytest.approx({0: 100, 1: 400, 2: 300, 3: 200}, abs=1)


def test_equals_are_walked_by_token_id() -> None:
    logits = torch.zeros(10)
    assert [choose(logits, Sampling(1.0), index / 10 + 0.05) for index in range(10)] == list(range(10))


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([-1e4, 1e4, 3.0]).bfloat16()
    assert choose(logits, Sampling(temperature), 0.0) == 1


@pytest.mark.parametrize("worst", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(worst: float, temperature: float) -> None:
    with pytest.raises(InvalidRequest):
        choose(torch.tensor([1.0, worst, 2.0]), Sampling(temperature), 0.5)


def test_the_largest_uniform_stays_inside() -> None:
    logits = torch.full((50000,), -3.0)
    assert choose(logits, Sampling(1.0), math.nextafter(1.0, 0.0)) == 49999
