from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.api.chat import ChatRequest
from services.gateway.api.completions import CompletionRequest
from services.gateway.api_errors import ApiError

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse(json.dumps({"model": "m", "messages": HI, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def refused_completion(param: str | None, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    return caught.value


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
        {"prompt_logprobs": 0},
        {"echo": False},
    ],
)
def test_unsupported_fields_are_accepted_where_they_change_nothing(neutral: dict[str, Any]) -> None:
    assert chat(**neutral) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 3),
        ("prompt_logprobs", 1),
        ("include_stop_str_in_output", True),
        ("functions", [{}]),
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
        ("max_tokens", -1),
        ("min_p", 1.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("top_logprobs", 1),
        ("min_tokens", -1),
        ("stop_token_ids", [-1]),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "a"}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(i): 1 for i in range(2000)}),
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
    with pytest.raises(ApiError) as caught:
        chat(**{name: value})
    assert (caught.value.status, str(caught.value.param).split("[")[0]) == (400, name)
    assert name in caught.value.message


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
    [
        ("hi", ["hi"]),
        (["hi"], ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
        ([], [[]]),
        ([[]], [[]]),
    ],
)
def test_prompts_are_texts_or_token_ids(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt", [[1, "a"], ["a", [1]], [[1], "a"], [True], [-1], [2**32], {"a": 1}, 5, [1.5], [[[1]]], ["a"] * 129]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    refused_completion("prompt", prompt=prompt)


def test_choices_are_bounded_over_all_prompts() -> None:
    assert completion(prompt=["a"] * 64, n=2).n == 2
    assert "128" in refused_completion("n", prompt=["a"] * 65, n=2).message


def test_best_of_is_what_n_is() -> None:
    assert completion(n=3, best_of=3).num_choices == 3
    refused_completion("best_of", n=3, best_of=4)
    refused("best_of", n=2, best_of=1)


def test_no_tokens_may_be_asked_for_with_echo_only() -> None:
    assert completion(max_tokens=0, echo=True).tokens_asked == 0
    refused_completion("max_tokens", max_tokens=0)
    refused("max_completion_tokens", max_completion_tokens=0)


def test_the_least_tokens_are_not_above_the_most() -> None:
    assert completion(min_tokens=5, max_tokens=5).min_tokens == 5
    assert "max_tokens" in refused_completion("min_tokens", min_tokens=6, max_tokens=5).message


def test_logprobs_are_asked_for_in_the_two_shapes() -> None:
    assert chat(logprobs=True, top_logprobs=20).top_logprobs_asked == 20
    assert chat(logprobs=True).top_logprobs_asked == 0
    assert chat().top_logprobs_asked is None
    assert completion(logprobs=0).top_logprobs_asked == 0
    assert completion().top_logprobs_asked is None
    refused_completion("logprobs", logprobs=21)
    refused_completion("logprobs", logprobs=True)


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"max_completion_tokens": 5}])
def test_what_only_chats_have_is_refused_for_completions(fields: dict[str, Any]) -> None:
    (name,) = fields
    assert refused_completion(name, **fields).code == "unsupported_parameter"


def test_biases_are_by_token_id() -> None:
    assert chat(logit_bias={"50256": -100, "7": 0.5}).logit_bias == {50256: -100.0, 7: 0.5}
    assert "'x'" in refused("logit_bias", logit_bias={"x": 1}).message


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


def test_other_parts_are_refused() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    refused("messages[0].content[0].type", messages=[image])
    refused("messages[0].role", messages=[{"role": "wizard", "content": "hi"}])


@pytest.mark.parametrize("role", [[], {}, 5, True])
def test_roles_of_any_type_are_refused(role: Any) -> None:
    refused("messages[0].role", messages=[{"role": role, "content": "hi"}])


def test_max_completion_tokens_counts_over_max_tokens() -> None:
    assert chat(max_tokens=5).tokens_asked == 5
    assert chat(max_completion_tokens=7).tokens_asked == 7
    assert chat(max_tokens=5, max_completion_tokens=7).tokens_asked == 7


def test_what_load_generators_send_is_accepted() -> None:
    """As guidellm 0.8 and `vllm bench serve` 0.32 do, which also ask for counts in each event: these are left out."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    guidellm = chat(max_completion_tokens=128, stop=None, ignore_eos=True, stream=True, stream_options=usage)
    vllm = completion(
        max_tokens=128, repetition_penalty=1.0, logprobs=None, ignore_eos=True, stream=True, stream_options=usage
    )
    for request in (guidellm, vllm):
        assert request.stream
        assert request.include_usage
        assert request.ignore_eos
    assert (guidellm.tokens_asked, vllm.max_tokens) == (128, 128)
