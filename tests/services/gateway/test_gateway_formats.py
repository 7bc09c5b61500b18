from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshnet.logprobs import TokenLogprobs
from services.gateway.choice import ChoiceResult
from services.gateway.formats.answer import DONE, Usage, sse
from services.gateway.formats.choices import ChatFormat, CompletionFormat
from services.gateway.formats.logprobs import chat_logprobs, completion_logprobs, token_text
from services.gateway.text_output import Piece, TokenEntry

CHAT = ChatFormat("id", "m", 7)
COMPLETION = CompletionFormat("id", "m", 7)
HI = ChoiceResult("hi", (), "stop")


@given(st.text())
def test_an_event_is_one_data_line_that_holds_the_object(text: str) -> None:
    encoded = sse({"text": text})
    assert encoded.startswith(b"data: ")
    assert encoded.endswith(b"\n\n")
    assert b"\n" not in encoded[:-2]
    assert b"\r" not in encoded
    assert json.loads(encoded[len(b"data: ") :]) == {"text": text}


def chunks(events: Iterable[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in events if event != DONE]


def choices(events: Iterable[bytes]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks(events) for choice in chunk["choices"]]


def test_chat_chunks_carry_role_then_text_then_reason() -> None:
    (start,) = chunks(CHAT.start())
    assert start["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (start["object"], start["id"]) == ("chat.completion.chunk", "chatcmpl-id")
    text, end = choices(CHAT.piece(0, Piece("x", (), "stop")))
    assert (text["delta"], text["finish_reason"]) == ({"content": "x"}, None)
    assert (end["delta"], end["finish_reason"]) == ({}, "stop")
    assert choices(CHAT.piece(0, Piece())) == []


def test_every_choice_of_a_chat_begins_with_its_role() -> None:
    assert [choice["index"] for choice in choices(ChatFormat("id", "m", 7, 3).start())] == [0, 1, 2]


def test_completion_chunks_carry_text() -> None:
    assert list(COMPLETION.start()) == []
    text, end = choices(COMPLETION.piece(2, Piece("x", (), "length")))
    assert text == {"index": 2, "text": "x", "finish_reason": None, "logprobs": None}
    assert end == {"index": 2, "text": "", "finish_reason": "length", "logprobs": None}


def test_usage_is_in_one_last_chunk_without_choices_and_null_before() -> None:
    asked = ChatFormat("id", "m", 7, include_usage=True)
    *events, done = asked.end(Usage(3, 2))
    assert done == DONE
    (last,) = chunks(events)
    assert last["choices"] == []
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert last["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    assert Usage(300, 2, 256).as_json()["prompt_tokens_details"] == {"cached_tokens": 256}
    assert chunks(asked.piece(0, Piece("x")))[0]["usage"] is None
    assert "usage" not in chunks(CHAT.piece(0, Piece("x")))[0]
    assert list(CHAT.end(Usage(3, 2))) == [DONE]


def test_a_whole_answer_always_has_its_usage() -> None:
    chat = CHAT.whole([HI, HI], Usage(1, 1))
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["hi", "hi"]
    assert [choice["index"] for choice in chat["choices"]] == [0, 1]
    assert chat["object"] == "chat.completion"
    assert chat["usage"]["total_tokens"] == 2
    completion = COMPLETION.whole([HI], Usage(1, 1))
    assert completion["choices"][0]["text"] == "hi"
    assert completion["usage"]["total_tokens"] == 2


BYTES = {1: b"a", 2: b"\xf0\x9f", 3: b"</s>", 4: "é".encode(), 5: b"a"}
TOKENS = (
    TokenEntry(1, 0, None),
    TokenEntry(2, 1, TokenLogprobs(-1.5, ((4, -0.5),))),
    TokenEntry(5, 1, TokenLogprobs(-2.0, ((1, -1.0), (5, -2.0)))),
    TokenEntry(3, 2, TokenLogprobs(float("-inf"), ()), is_stop=True),
)


def test_logprobs_of_a_chat_have_bytes_and_no_stop_token() -> None:
    content = chat_logprobs(TOKENS, BYTES.__getitem__)["content"]
    assert content[0] == {
        "token": "bytes:\\xf0\\x9f",
        "logprob": -1.5,
        "bytes": [0xF0, 0x9F],
        "top_logprobs": [{"token": "é", "logprob": -0.5, "bytes": [0xC3, 0xA9]}],
    }
    assert [token["token"] for token in content] == ["bytes:\\xf0\\x9f", "a"]


def test_logprobs_of_a_completion_are_lists_with_offsets() -> None:
    shown = completion_logprobs(TOKENS, BYTES.__getitem__)
    assert shown == {
        "tokens": ["a", "bytes:\\xf0\\x9f", "a", "</s>"],
        "token_logprobs": [None, -1.5, -2.0, -9999.0],
        "top_logprobs": [None, {"é": -0.5, "bytes:\\xf0\\x9f": -1.5}, {"a": -1.0}, {"</s>": -9999.0}],
        "text_offset": [0, 1, 1, 2],
    }


@given(st.binary())
def test_the_text_of_any_token_is_text(token: bytes) -> None:
    text = token_text(token)
    assert text.encode() == token or text.startswith("bytes:\\x")
