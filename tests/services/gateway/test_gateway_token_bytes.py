from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.token_bytes import TokenBytes
from services.gateway.tokenization import ModelTokenizer
from tests.services.gateway.test_gateway_detokenizer import FIRST_BYTE, SENTENCEPIECE

TEXTS = ["Hello, world!", "naïve café 🙂👩‍👩‍👧 日本語", "\x00\x01\x7f\n\t  ", "<|im_start|>user\nhi<|im_end|>"]


def test_the_bytes_of_the_tokens_of_a_text_are_its_bytes(tokenizer: ModelTokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, special_tokens=False)
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


@given(text=st.text())
def test_so_they_are_for_any_text(tokenizer: ModelTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, special_tokens=False)
    # This vocabulary lacks bytes that begin characters of planes which are not used.
    assume(tokenizer.decode_whole(ids) == text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


def test_sentencepiece_tokens_have_spaces_and_single_bytes() -> None:
    token_bytes = TokenBytes(SENTENCEPIECE)
    words = {word: token_bytes(SENTENCEPIECE.get_vocab()[word]) for word in ("▁the", "s", "▁", "▁é", "<eos>")}
    assert words == {"▁the": b" the", "s": b"s", "▁": b" ", "▁é": " é".encode(), "<eos>": b"<eos>"}
    assert [token_bytes(FIRST_BYTE + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_metaspace_is_a_space_and_unknown_ids_are_nothing() -> None:
    tokenizer = Tokenizer(models.BPE({"_a": 0}, []))
    tokenizer.decoder = decoders.Metaspace("_")
    assert TokenBytes(tokenizer)(0) == b" a"
    assert TokenBytes(tokenizer)(1) == b""


def test_a_tokenizer_without_a_decoder_has_its_tokens_as_they_are() -> None:
    tokenizer = Tokenizer(models.BPE({"é": 0, "<0x41>": 1}, []))
    assert [TokenBytes(tokenizer)(token_id) for token_id in (0, 1)] == ["é".encode(), b"<0x41>"]
