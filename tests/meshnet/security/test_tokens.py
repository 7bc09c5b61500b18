"""Tokens as text, and what a header may show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InvalidRequest
from meshnet.security.tokens import (
    NUM_RANDOM_BYTES,
    PREFIX,
    authorization,
    check_token,
    is_one_of,
    make_token,
    shown_token,
)


def test_a_token_is_32_random_bytes_behind_a_prefix_that_is_known() -> None:
    asked: list[int] = []

    def random_bytes(count: int) -> bytes:
        asked.append(count)
        return bytes(range(count))

    token = make_token(random_bytes)
    assert asked == [NUM_RANDOM_BYTES] == [32]
    assert token == PREFIX + "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    assert PREFIX == "meshnet_"
    assert check_token(token) == token


def test_no_two_tokens_are_the_same() -> None:
    tokens = {make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(token.startswith(PREFIX) for token in tokens)


@pytest.mark.parametrize(
    "text",
    ["", "short", "x" * 31, "x" * 513, "x" * 40 + " y", "x" * 40 + "\n", "ä" * 40, "x" * 40 + "\0", "x" * 40 + ","],
)
def test_what_is_no_token_is_refused_without_being_said(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_token(text)
    assert len(text) < 10 or text not in str(caught.value)


@pytest.mark.parametrize("header", ["Bearer abc", "bearer abc", "BEARER  abc ", " Bearer abc"])
def test_what_a_header_shows(header: str) -> None:
    assert shown_token(header) == b"abc"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic abc", "abc", "Bearerabc", "Bearer\tabc"])
def test_headers_that_show_nothing(header: str) -> None:
    assert shown_token(header) == b""


@given(st.text())
def test_no_text_is_too_strange_to_be_compared(text: str) -> None:
    token = make_token().encode()
    assert not is_one_of(shown_token(text), [token])
    assert not is_one_of(shown_token(f"Bearer {text}"), [token])


def test_each_of_several_is_accepted_and_no_part_of_one() -> None:
    first, second = make_token(), make_token()
    tokens = [first.encode(), second.encode()]
    assert is_one_of(shown_token(authorization(first)), tokens)
    assert is_one_of(shown_token(authorization(second)), tokens)
    for wrong in (first[:-1], first + "x", first.swapcase(), ""):
        assert not is_one_of(shown_token(authorization(wrong)), tokens)
