"""What choices hang on: the same behind a text and behind a draft that may become it, in one call or in two."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.core.choices import ANYWHERE, Counted, Place
from services.node.core.history import History, TokenCounts
from services.node.core.request import GenerationRequest
from services.node.core.work import Sampling

TEXTS = st.lists(st.integers(0, 9), max_size=30)


def pairs(counted: Counted) -> dict[int, int]:
    token_ids, times = array("q", bytes(counted.token_ids)), array("q", bytes(counted.times))
    found = dict(zip(token_ids, times, strict=True))
    assert len(found) == len(token_ids), "each token once"
    return found


def plain(read: list[int], generated: list[int]) -> dict[int, int]:
    return dict.fromkeys(read, 0) | Counter(generated)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_tokens_are_counted_behind_a_text_and_behind_each_token_of_a_draft(
    read: list[int], generated: list[int], draft: list[int], more: list[int]
) -> None:
    counts = TokenCounts(read, generated)
    assert [pairs(one) for one in counts.behind(draft)] == [
        plain(read, generated + draft[:index]) for index in range(len(draft) + 1)
    ]
    # The draft has left nothing behind.
    for token in more:
        counts.add(token)
    assert pairs(counts.counted()) == plain(read, generated + more)


def request(**more: Any) -> GenerationRequest:
    return GenerationRequest("r", "m", (1, 2, 3), 20, **more)


def test_nothing_is_counted_or_barred_unless_it_matters() -> None:
    history = History(request(stop_token_ids=frozenset({5})), random.Random(0))
    assert all(place is ANYWHERE for place in history.places((1, 2, 3)))


@pytest.mark.parametrize(
    ("sampling", "counted"),
    [(Sampling(repetition_penalty=1.5), {1: 0, 2: 0, 3: 0}), (Sampling(presence_penalty=1.5), {})],
)
def test_the_prompt_counts_where_a_penalty_looks_at_it(sampling: Sampling, counted: dict[int, int]) -> None:
    history = History(request(sampling=sampling), random.Random(0))
    (place,) = history.places(())
    assert place.counted
    assert pairs(place.counted) == counted


def test_stop_tokens_are_barred_until_enough_are_there_also_behind_drafts() -> None:
    history = History(request(stop_token_ids=frozenset({9, 5}), min_new_tokens=3), random.Random(0))
    assert history.places((1, 2, 3)) == [Place(barred=(5, 9))] * 3 + [ANYWHERE]
    history.uniforms(2)
    history.emitted(1)
    history.emitted(2)
    assert history.places((4,)) == [Place(barred=(5, 9)), ANYWHERE]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_a_call_that_broke_off_is_gone_on_with_as_if_it_had_not(generated: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(generated)))
    sampling = Sampling(1.0, repetition_penalty=1.2, frequency_penalty=0.5)
    whole = request(sampling=sampling, min_new_tokens=8, stop_token_ids=frozenset({4}))
    rest = replace(whole, prompt=(*whole.prompt, *generated[:cut]), num_generated=cut)
    first, second = History(whole, random.Random(1)), History(rest, random.Random(1))
    for index, token in enumerate(generated):
        draft = generated[index:]
        if index >= cut:
            assert first.uniforms(len(draft)) == second.uniforms(len(draft))
            assert first.places(draft) == second.places(draft)
            second.emitted(token)
        else:
            first.uniforms(1)
        first.emitted(token)
