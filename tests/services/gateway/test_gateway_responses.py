from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from meshnet.errors import NextHopFailed
from meshnet.v1 import inference_pb2
from services.gateway.api.responses import ResponsesRequest
from services.gateway.api_errors import ApiError
from services.gateway.tokenization import ModelTokenizer
from tests.services.gateway.conftest import END
from tests.services.gateway.fake_mesh import FakeMesh, tokens, tokens_then_fail
from tests.services.gateway.gateway_process import Gateway

LENGTH = inference_pb2.FINISH_REASON_LENGTH
TYPES = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def prompt_of(mesh: FakeMesh, tokenizer: ModelTokenizer) -> str:
    return tokenizer.decode_whole(mesh.a.requests[0].prompt_token_ids)


def test_a_text_is_answered_with_a_message(client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer) -> None:
    mesh.a.script = tokens(81, 82, END, cached=3)
    response = client.responses.create(
        model="smol", input="hi", instructions="Be brief.", temperature=0.5, top_p=0.25, metadata={"a": "b"}, store=True
    )
    assert (response.status, response.output_text) == ("completed", "ab")
    assert response.usage is not None
    (request,) = mesh.a.requests
    num_prompt = len(request.prompt_token_ids)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (num_prompt, 3)
    assert response.usage.total_tokens == num_prompt + 3
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.25)
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert response.id == f"resp_{request.request_id}"
    text = prompt_of(mesh, tokenizer)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert "<|im_start|>user\nhi<|im_end|>" in text


def test_a_conversation_goes_on_with_what_was_answered(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    mesh.a.script = tokens(81, END)
    first = client.responses.create(model="smol", input="one")
    mesh.a.requests.clear()
    turns: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        *(item.model_dump() for item in first.output),
        {"type": "message", "role": "user", "content": "two"},
    ]
    client.responses.create(model="smol", input=turns)
    text = prompt_of(mesh, tokenizer)
    turns_in_order = ["system\nBe brief.", "user\none", "assistant\na<|im_end|>", "user\ntwo"]
    places = [text.index(turn) for turn in turns_in_order]
    assert places == sorted(places)


def test_a_text_cut_at_its_most_tokens_is_incomplete(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(81, 82, 83)
    response = client.responses.create(model="smol", input="hi", max_output_tokens=2)
    assert (response.status, response.output_text) == ("incomplete", "ab")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert mesh.a.requests[0].max_new_tokens == 2


def test_a_stream_has_typed_events_in_order(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(81, 82, END)
    events: list[Any] = list(client.responses.create(model="smol", input="hi", stream=True))
    assert [event.type for event in events] == TYPES
    assert [event.sequence_number for event in events] == list(range(len(TYPES)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "ab"
    last = events[-1].response
    assert (last.status, last.output_text, last.usage.output_tokens) == ("completed", "ab", 3)
    assert {event.response.id for event in (events[0], events[1])} == {last.id}
    assert events[-2].item == last.output[0]


def test_a_streamed_response_is_the_unstreamed_one(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(81, 82, END)
    body = {"model": "smol", "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = httpx.post(f"{gateway.url}/v1/responses", json=body).json()
    text = httpx.post(f"{gateway.url}/v1/responses", json={**body, "stream": True}).text
    last = json.loads(text.strip().split("\n")[-1].removeprefix("data: "))["response"]
    for response in (whole, last):
        assert response.pop("id").startswith("resp_")
        assert response.pop("created_at") > 0
        assert response["output"][0].pop("id").startswith("msg_")
    assert last == whole
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert [(token["token"], len(token["top_logprobs"])) for token in logprobs] == [("a", 1), ("b", 1)]
    assert "[DONE]" not in text


def test_the_stream_helper_of_the_official_client_works(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(81, 82, END)
    with client.responses.stream(model="smol", input="hi") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots == ["a", "ab"]
    assert final.output_text == "ab"


def test_a_stream_cut_at_its_most_tokens_is_incomplete(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(81, 82, finish=LENGTH)
    *_, last = client.responses.create(model="smol", input="hi", stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output[0].type == "message"
    assert last.response.output[0].status == "incomplete"


def test_a_stream_that_fails_says_how(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_fail(NextHopFailed("hop b failed", "b"), 81)
    *_, error, last = client.responses.create(model="smol", input="hi", stream=True)
    assert error.type == "error"
    assert (error.code, error.message) == ("next_hop_failed", "hop b failed")
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.message == "hop b failed"


def test_what_fails_before_the_first_token_has_its_own_status(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_fail(NextHopFailed("hop b failed", "b"))
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="smol", input="hi", stream=True)
    assert caught.value.status_code == 502


def parse(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())


@pytest.mark.parametrize(
    "neutral",
    [
        {"store": False},
        {"tools": []},
        {"tool_choice": "auto"},
        {"reasoning": {"effort": None}},
        {"truncation": "disabled"},
        {"previous_response_id": None},
        {"parallel_tool_calls": True},
        {"service_tier": "auto"},
    ],
)
def test_what_changes_nothing_is_accepted(neutral: dict[str, Any]) -> None:
    assert parse(**neutral) == parse()


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("tools", {"tools": [{"type": "function"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("guided_regex", {"guided_regex": "a"}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("reasoning", {"reasoning": {"effort": "high"}}),
        ("background", {"background": True}),
        ("conversation", {"conversation": "c"}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("truncation", {"truncation": "auto"}),
        ("input[0]", {"input": [{"type": "function_call_output", "call_id": "1", "output": "2"}]}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "unsupported_parameter")


def test_a_previous_response_is_told_that_none_is_kept() -> None:
    with pytest.raises(ApiError, match="keeps no responses"):
        parse(previous_response_id="resp_1")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": []}),
        ("input", {"input": 5}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input[0].role", {"input": [{"role": "wizard", "content": "x"}]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": 3}),
        ("text", {"text": 5}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("include[0]", {"include": ["web_search_call.results"]}),
        ("min_tokens", {"min_tokens": 5, "max_output_tokens": 4}),
    ],
)
def test_bad_values_are_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
