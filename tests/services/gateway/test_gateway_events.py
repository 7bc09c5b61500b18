from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway import events
from services.gateway.events import ChatFormat, CompletionFormat

CHAT = ChatFormat("id", "m", 7)
COMPLETION = CompletionFormat("id", "m", 7)


@given(st.text())
def test_an_event_is_one_data_line_that_holds_the_object(text: str) -> None:
    encoded = events.sse({"text": text})
    assert encoded.startswith(b"data: ")
    assert encoded.endswith(b"\n\n")
    assert b"\n" not in encoded[:-2]
    assert b"\r" not in encoded
    assert json.loads(encoded[len(b"data: ") :]) == {"text": text}


def choice(chunk: dict[str, Any]) -> dict[str, Any]:
    (only,) = chunk["choices"]
    assert only["index"] == 0
    return dict(only)


def test_chat_chunks_carry_role_then_text_then_reason() -> None:
    start = CHAT.start()
    assert start is not None
    assert choice(start)["delta"] == {"role": "assistant", "content": ""}
    assert choice(CHAT.text("x"))["delta"] == {"content": "x"}
    assert choice(CHAT.end("stop"))["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in (start, CHAT.text("x"), CHAT.end("stop"))} == {"chat.completion.chunk"}
    assert start["id"] == "chatcmpl-id"


def test_completion_chunks_carry_text() -> None:
    assert COMPLETION.start() is None
    assert choice(COMPLETION.text("x"))["text"] == "x"
    assert choice(COMPLETION.end("length")) == {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
    assert COMPLETION.text("x")["id"] == "cmpl-id"


def test_usage_is_in_one_last_chunk_without_choices_and_null_before() -> None:
    asked = ChatFormat("id", "m", 7, include_usage=True)
    last = asked.last(events.usage(3, 2))
    assert last["choices"] == []
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert last["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    details = events.usage(300, 2, 256)["prompt_tokens_details"]
    assert details == {"cached_tokens": 256}
    assert asked.text("x")["usage"] is None
    assert "usage" not in CHAT.text("x")


def test_a_whole_answer_always_has_its_usage() -> None:
    chat = CHAT.whole("hi", "stop", events.usage(1, 1))
    assert chat["choices"][0]["message"]["content"] == "hi"
    assert chat["object"] == "chat.completion"
    assert chat["usage"]["total_tokens"] == 2
    completion = COMPLETION.whole("hi", "stop", events.usage(1, 1))
    assert completion["choices"][0]["text"] == "hi"
    assert completion["usage"]["total_tokens"] == 2
