"""Guesses are what stood there before, and what is accepted of them is what would have been drawn anyway."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from services.node.core.drafts import MAX_INDEXED, MAX_MATCH, MAX_PLACES, MIN_MATCH, PromptLookup, Uniforms, accept

# Few different tokens, so that much is repeated.
TEXTS = st.lists(st.integers(0, 3), max_size=200)


def match_length(tokens: list[int], place: int) -> int:
    length = 0
    while length < min(place, MAX_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def brute_force(tokens: list[int]) -> int | None:
    places = [place for place in range(1, len(tokens)) if match_length(tokens, place) >= MIN_MATCH][-MAX_PLACES:]
    return max(places, key=lambda place: (match_length(tokens, place), place), default=None)


@given(TEXTS, TEXTS)
def test_what_is_found_is_what_a_search_of_all_finds(prompt: list[int], emitted: list[int]) -> None:
    lookup, tokens = PromptLookup(prompt), list(prompt)
    assert lookup.find() == brute_force(tokens)
    for token in emitted:
        lookup.append(token)
        tokens.append(token)
        assert lookup.find() == brute_force(tokens)


@given(TEXTS, st.integers(0, 20))
def test_a_draft_is_what_followed_and_goes_on_in_itself(tokens: list[int], num_tokens: int) -> None:
    lookup = PromptLookup(tokens)
    place = lookup.find()
    if place is not None:
        draft = lookup.draft(place, num_tokens)
        whole = tokens + list(draft)
        assert list(draft) == [whole[place + index] for index in range(num_tokens)]


def test_a_draft_by_example() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    place = lookup.find()
    assert place == 3, "three tokens agree there, two where they stood last"
    assert lookup.draft(place, 4) == (4, 9, 2, 3)
    assert PromptLookup([1, 2, 3, 4]).find() is None
    assert PromptLookup([5, 6, 7, 6, 7]).draft(3, 5) == (6, 7, 6, 7, 6)


def test_of_a_longer_prompt_the_end_is_searched() -> None:
    distinct = list(range(10, 10 + MAX_INDEXED))
    assert PromptLookup([*distinct, *distinct[-3:]]).find() is not None
    assert PromptLookup([1, 2, 3, *distinct, 1, 2]).find() is None


@given(st.lists(st.integers(0, 2), max_size=15), st.lists(st.integers(0, 2), min_size=16, max_size=16))
def test_accepted_is_what_is_drawn_one_by_one(draft: list[int], drawn: list[int]) -> None:
    """Behind a right draft the draw is that of the true text; behind a wrong one nothing is."""
    drawn = drawn[: len(draft) + 1]
    true = [drawn[0]]
    for guess, outcome in zip(draft, drawn[1:], strict=True):
        if guess != true[-1]:
            break
        true.append(outcome)
    assert accept(draft, drawn) == true


@given(st.lists(st.integers(1, 16), max_size=50), st.randoms(use_true_random=False))
def test_each_token_has_its_own_draw_however_many_are_looked_at(looks: list[int], choice: random.Random) -> None:
    uniforms, plain = Uniforms(random.Random(3)), random.Random(3)
    for look in looks:
        ahead = uniforms.next(look)
        assert len(ahead) == look
        for index in range(choice.randint(1, look)):
            assert plain.random() == ahead[index]
            uniforms.emitted()
