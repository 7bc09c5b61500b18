from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from meshnet.logprobs import TokenLogprobs
from services.gateway.text_output import LENGTH, STOP, Piece, TextOutput


def decode(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", "replace")


def push_all(output: TextOutput, text: bytes) -> str:
    return "".join(output.push(token_id).text for token_id in text)


def test_a_stop_token_ends_the_text_and_is_counted_but_not_shown() -> None:
    output = TextOutput(decode, [0])
    assert push_all(output, b"ab") + output.push(0).text == "ab"
    assert (output.finish_reason, output.num_tokens) == (STOP, 3)


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    output = TextOutput(decode, (), ["bcd"])
    assert push_all(output, b"abc") == "a"
    assert output.finish(LENGTH).text == "bc"
    assert output.finish_reason == LENGTH


def test_a_stop_string_that_only_the_flush_completes_is_found() -> None:
    output = TextOutput(decode, (), ["\N{REPLACEMENT CHARACTER}"])
    assert push_all(output, b"a\xf0") + output.finish(LENGTH).text == "a"
    assert output.finish_reason == STOP


def test_once_ended_it_stays_as_it_is() -> None:
    output = TextOutput(decode, (), ["b"])
    assert push_all(output, b"ab") == "a"
    assert output.finish(LENGTH).text == ""
    assert output.finish_reason == STOP


def shown(output: TextOutput, token_ids: bytes) -> list[Piece]:
    """Each token with its own id as logprob."""
    return [output.push(token_id, TokenLogprobs(float(token_id))) for token_id in token_ids]


def tokens_of(pieces: list[Piece]) -> bytes:
    return bytes(token.token_id for piece in pieces for token in piece.tokens)


def test_tokens_come_with_the_text_that_they_begin_and_know_where() -> None:
    output = TextOutput(decode, (), ["bcd"], offset=10)
    pieces = [*shown(output, "aébc".encode()), output.finish(LENGTH)]
    assert [(piece.text, tokens_of([piece])) for piece in pieces] == [
        ("a", b"a"),
        ("", b""),
        ("é", "é".encode()),
        ("", b""),
        ("", b""),
        ("bc", b"bc"),
    ]
    assert [token.offset for piece in pieces for token in piece.tokens] == [10, 11, 11, 12, 13]


def test_tokens_behind_a_text_that_a_stop_string_cut_are_not_shown() -> None:
    output = TextOutput(lambda ids: "".join(["Hello", " wor", "ld", "!"][i] for i in ids), (), ["world"])
    pieces = shown(output, bytes([0, 1, 2]))
    assert "".join(piece.text for piece in pieces) == "Hello "
    assert tokens_of(pieces) == bytes([0, 1])
    assert pieces[-1].finish_reason == STOP


def test_a_stop_token_is_shown_as_such() -> None:
    pieces = shown(TextOutput(decode, [0], []), b"a\0")
    assert [(token.token_id, token.is_stop) for piece in pieces for token in piece.tokens] == [(97, False), (0, True)]


def test_stop_strings_count_behind_the_least_tokens() -> None:
    output = TextOutput(decode, (), ["a"], min_tokens=2)
    assert push_all(output, b"aa") == "aa"
    assert output.finish_reason is None
    assert output.push(ord("a")).finish_reason == STOP


def test_a_text_goes_on_behind_its_context() -> None:
    def words(token_ids: Sequence[int]) -> str:
        return "".join([" a", " b", "\N{REPLACEMENT CHARACTER}"][i] for i in token_ids).removeprefix(" ")

    assert TextOutput(words).push(1).text == "b"
    assert TextOutput(words, context=[0]).push(1).text == " b"
    # Half a character is no context: the answer may bring the other half.
    assert TextOutput(words, context=[2]).push(1).text == "b"


@given(
    st.lists(st.integers(0, 255), max_size=30), st.lists(st.text("ab\N{REPLACEMENT CHARACTER}", min_size=1), max_size=2)
)
def test_every_token_before_the_end_is_shown_once_and_in_order(token_ids: list[int], stops: list[str]) -> None:
    output = TextOutput(decode, [0], stops)
    pieces, pushed = [], []
    for token_id in token_ids:
        pushed.append(token_id)
        pieces += shown(output, bytes([token_id]))
        if output.finish_reason is not None:
            break
    else:
        pieces.append(output.finish(LENGTH))
    got = tokens_of(pieces)
    text = "".join(piece.text for piece in pieces)
    assert bytes(pushed).startswith(got)
    if text == decode([token_id for token_id in pushed if token_id]):
        assert all(token.offset <= len(text) for piece in pieces for token in piece.tokens)
    reasons = [piece.finish_reason for piece in pieces if piece.finish_reason is not None]
    assert len(reasons) == 1
