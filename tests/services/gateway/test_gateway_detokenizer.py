from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.detokenizer import REPLACEMENT, Detokenizer


def decode_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer with one token a byte, and none for 256 and above."""
    return bytes(token_id for token_id in token_ids if token_id < 256).decode("utf-8", "replace")


def sentencepiece() -> Tokenizer:
    """A tokenizer as Llama's: words with their space, bytes for what has no word; the first space is dropped."""
    words = ["<unk>", "▁the", "▁cat", "s", "▁", "▁é"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


SENTENCEPIECE = sentencepiece()
FIRST_BYTE = SENTENCEPIECE.get_vocab()["<0x00>"]


def decode_sentencepiece(token_ids: Sequence[int]) -> str:
    text: str = SENTENCEPIECE.decode(list(token_ids), skip_special_tokens=True)
    return text


def pieces(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.text())
def test_the_pieces_of_any_text_are_that_text_and_never_half_a_character(text: str) -> None:
    got = pieces(Detokenizer(decode_bytes), list(text.encode()))
    assert "".join(got) == text
    assert (REPLACEMENT in "".join(got)) == (REPLACEMENT in text)


@given(st.lists(st.integers(0, 300)))
def test_any_bytes_give_what_decoding_all_at_once_gives(token_ids: list[int]) -> None:
    assert "".join(pieces(Detokenizer(decode_bytes), token_ids)) == decode_bytes(token_ids)


def _text_tokens(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


WORDS = st.sampled_from([[1], [2], [3], [4], [5], [SENTENCEPIECE.token_to_id("<eos>")]])


@given(st.lists(WORDS | st.text(max_size=3).map(_text_tokens)))
def test_spaces_and_byte_tokens_of_sentencepiece_come_out_as_decoded_at_once(words: list[list[int]]) -> None:
    token_ids = list(itertools.chain.from_iterable(words))
    got = "".join(pieces(Detokenizer(decode_sentencepiece), token_ids))
    assert got == decode_sentencepiece(token_ids)


def test_a_character_appears_with_its_last_byte() -> None:
    got = pieces(Detokenizer(decode_bytes), list("a🙂".encode()))
    assert got == ["a", "", "", "", "🙂", ""]


def test_bytes_that_stay_incomplete_come_with_the_flush() -> None:
    got = pieces(Detokenizer(decode_bytes), [ord("a"), 0xF0, 0x9F])
    assert got == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("text", ["", "�", "a�", "�a"])
def test_a_replacement_character_of_the_text_itself_is_kept(text: str) -> None:
    assert "".join(pieces(Detokenizer(decode_bytes), list(text.encode()))) == text


def test_the_window_stays_short() -> None:
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode_bytes(token_ids)

    pieces(Detokenizer(decode), list("überall 🙂".encode()) * 100)
    assert longest <= 8
