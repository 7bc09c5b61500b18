"""Tools in chats: what the model is told, what the mesh is asked, and calls in answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from services.gateway.api.chat import ChatRequest, template_messages
from services.gateway.api_errors import ApiError
from services.gateway.tokenization import ModelTokenizer
from tests.services.gateway.conftest import END
from tests.services.gateway.fake_mesh import FakeMesh, tokens
from tests.services.gateway.gateway_process import Gateway

HI: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "It tells.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALLED: list[Any] = [
    *HI,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]


def parse(**fields: Any) -> ChatRequest:
    return ChatRequest.parse(json.dumps({"model": "m", "messages": HI, **fields}).encode())


def says(mesh: FakeMesh, tokenizer: ModelTokenizer, text: str) -> None:
    mesh.a.script = tokens(*tokenizer.encode(text, special_tokens=False), END)


def test_what_is_asked_of_tools() -> None:
    assert (
        parse().tools_asked() is parse(tools=[]).tools_asked() is parse(tools=TOOLS, tool_choice="none").tools_asked()
    )
    asked = parse(tools=TOOLS).tools_asked()
    assert asked is not None
    assert (asked.callable_names, asked.must_call, asked.is_parallel) == (("weather", "now"), False, True)
    assert asked.tools[0] == TOOLS[0]
    assert asked.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    asked = parse(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).tools_asked()
    assert asked is not None
    assert (asked.must_call, asked.is_parallel) == (True, False)
    asked = parse(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}).tools_asked()
    assert asked is not None
    assert (asked.callable_names, asked.must_call) == (("now",), True)


def calls_with(arguments: str) -> list[Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*HI, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": [TOOLS[0], TOOLS[0]]}),
        ("tools[0]", {"tools": [{"type": "function"}]}),
        ("tools[0]", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "always"}),
        ("guided_regex", {"tools": TOOLS, "guided_regex": "a"}),
        ("functions", {"functions": [{}]}),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)


@pytest.mark.parametrize("arguments", ["{", "5", "[" * 100_000])
def test_arguments_of_before_must_be_objects(arguments: str) -> None:
    with pytest.raises(ApiError) as caught:
        template_messages(parse(messages=calls_with(arguments)).messages)
    assert (caught.value.status, caught.value.param) == (400, "messages[1].tool_calls")


def test_templates_get_arguments_as_objects_and_names_of_results() -> None:
    _, called, first, second = template_messages(parse(messages=CALLED).messages)
    # None is looked into by some templates, and written as "None" by others.
    assert called["content"] == ""
    assert [call["function"] for call in called["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Köln"}},
        {"name": "now", "arguments": {}},
    ]
    assert first == {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"}
    assert (second["content"], second["name"]) == ("noon", "now")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ONE, None, [("weather", {"city": "Köln"})]),
        (f"I look.\n\n{ONE}\n{TWO}", "I look.", [("weather", {"city": "Köln"}), ("now", {})]),
        ("No need.", "No need.", []),
        ('<tool_call>\n{"name": weather}\n</tool_call>', '<tool_call>\n{"name": weather}\n</tool_call>', []),
    ],
)
def test_calls_are_the_same_whole_and_streamed(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer, text: str, content: str | None, calls: Any
) -> None:
    says(mesh, tokenizer, text)
    whole = client.chat.completions.create(model="smol", messages=HI, tools=TOOLS).choices[0]
    assert whole.message.content == content
    found: list[Any] = whole.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == calls
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    assert len({call.id for call in found}) == len(calls)
    assert not mesh.a.requests[0].HasField("grammar")
    with client.chat.completions.stream(model="smol", messages=HI, tools=TOOLS) as stream:
        events = [event for event in stream if event.type == "content.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or None) == content
    shown: list[Any] = streamed.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in shown] == [
        (call.function.name, call.function.arguments) for call in found
    ]
    if calls:
        assert "tool_call" not in "".join(event.delta for event in events)


def test_a_streamed_call_has_its_name_first(gateway: Gateway, mesh: FakeMesh, tokenizer: ModelTokenizer) -> None:
    says(mesh, tokenizer, f"{ONE}{TWO}")
    body = {"model": "smol", "messages": HI, "tools": TOOLS, "stream": True}
    lines = httpx.post(f"{gateway.url}/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    parts = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [part["index"] for part in parts] == [0, 0, 1, 1]
    assert parts[0]["id"].startswith("call_")
    assert parts[0]["function"] == {"name": "weather", "arguments": ""}
    assert parts[1] == {"index": 0, "function": {"arguments": '{"city": "Köln"}'}}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_unless_there_may_be_several_the_first_call_ends_it(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    says(mesh, tokenizer, f"{ONE}\n{TWO}")
    for stream in (False, True):
        options: Any = {"model": "smol", "messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
        if stream:
            with client.chat.completions.stream(**options) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**options).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.finish_reason) == ("weather", "tool_calls")


def test_a_text_cut_within_a_call_is_content(client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer) -> None:
    says(mesh, tokenizer, ONE)
    choice = client.chat.completions.create(model="smol", messages=HI, tools=TOOLS, max_tokens=5).choices[0]
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls
    assert ONE.startswith(choice.message.content or "?")


def test_who_must_call_is_kept_to_it(client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer) -> None:
    says(mesh, tokenizer, ONE)
    named: Any = {"type": "function", "function": {"name": "now"}}
    form: Any = {"type": "json_object"}
    client.chat.completions.create(model="smol", messages=HI, tools=TOOLS, tool_choice="required")
    client.chat.completions.create(model="smol", messages=HI, tools=TOOLS, tool_choice=named)
    client.chat.completions.create(model="smol", messages=HI, tools=TOOLS, response_format=form)
    client.chat.completions.create(model="smol", messages=HI, tools=TOOLS, tool_choice="none")
    required, only_now, either, none = (request.grammar.lark for request in mesh.a.requests)
    assert "weather" in required
    assert "now" in required
    assert "weather" not in only_now
    assert either.startswith("start: calls | content\n")
    assert none == ""
    told, *_, silent = (tokenizer.decode_whole(request.prompt_token_ids) for request in mesh.a.requests)
    assert "<tools>" in told
    assert "<tools>" not in silent


def test_tools_are_counted_by_tokenize(gateway: Gateway) -> None:
    def count(**body: Any) -> int:
        answer = httpx.post(f"{gateway.url}/tokenize", json={"model": "smol", **body})
        assert answer.status_code == 200, answer.text
        number: int = answer.json()["count"]
        return number

    assert count(messages=HI) < count(messages=HI, tools=TOOLS) < count(messages=CALLED, tools=TOOLS)
