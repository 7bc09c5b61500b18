from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.api_errors import ApiError
from services.gateway.openai_types import ChatRequest, CompletionRequest

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse(json.dumps({"model": "m", "messages": HI, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def refused(param: str | None, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    return caught.value


def test_null_is_absent_and_unknown_fields_are_ignored() -> None:
    fields = (
        "temperature",
        "top_p",
        "seed",
        "stop",
        "n",
        "logprobs",
        "tools",
        "stream",
        "stream_options",
        "logit_bias",
    )
    assert chat(**dict.fromkeys(fields), user="me", metadata={"a": 1}, store=True) == chat()


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"best_of": 1},
        {"logprobs": False},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"tools": []},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"echo": False},
    ],
)
def test_unsupported_fields_are_accepted_where_they_change_nothing(neutral: dict[str, Any]) -> None:
    assert chat(**neutral) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"50256": -100}),
        ("logit_bias", {"999999999": 1}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("echo", True),
        ("suffix", "x"),
        ("chat_template", "{{ 1 }}"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(name, **{name: value})
    assert name in error.message
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 1.5),
        ("top_k", -2),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 2**40),
        ("max_completion_tokens", -5),
        ("stream", "yes"),
        ("model", 5),
        ("messages", []),
        ("messages", HI * 20_000),
        ("messages", "hi"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    assert name in refused(name, **{name: value}).message


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0), ("top_p", 0), ("top_k", -1), ("seed", -1), ("seed", 2**63 - 1)]
)
def test_values_at_the_edge_are_accepted(name: str, value: Any) -> None:
    assert getattr(chat(**{name: value}), name) == value


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b'{"model": "\xff"}', b'{"a":' * 100_000, b"[1]", b"null", b'{"model": "\\ud800"}'],
    ids=["empty", "cut", "not-utf8", "not-utf8-inside", "deep", "list", "null", "lone-surrogate"],
)
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        ChatRequest.parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match="'prompt'") as caught:
        CompletionRequest.parse(b'{"model": "m"}')
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("hi", "hi"), (["hi"], "hi"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ("", ""), ([], [])],
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], [True], [-1], [2**32], {"a": 1}, 5, [1.5], [[]]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    if prompt == [[]]:
        assert completion(prompt=prompt).prompt == []
        return
    with pytest.raises(ApiError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_stop_is_one_string_or_several() -> None:
    assert chat(stop="a").stops == ("a",)
    assert chat(stop=["a", "b"]).stops == ("a", "b")
    assert chat().stops == ()
    refused("stop", stop=["a"] * 17)
    assert "stop" in refused("stop[0]", stop=[""]).message


def test_content_is_a_string_or_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts}, {"role": "user", "content": "c", "name": "me"}])
    assert [message.template_fields for message in request.messages] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c"},
    ]


def test_other_parts_and_tool_calls_are_refused() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    refused("messages[0].content[0].type", messages=[image])
    refused("messages[1]", messages=[*HI, {"role": "assistant", "tool_calls": [{"id": "1"}]}])
    refused("messages[1]", messages=[*HI, {"role": "tool", "content": "1", "tool_call_id": "1"}])
    refused("messages[0].role", messages=[{"role": "wizard", "content": "hi"}])


def test_max_completion_tokens_counts_over_max_tokens() -> None:
    assert chat(max_tokens=5).tokens_asked == 5
    assert chat(max_completion_tokens=7).tokens_asked == 7
    assert chat(max_tokens=5, max_completion_tokens=7).tokens_asked == 7
