"""SmolLM2-135M on two nodes, kept to schemas and tools: what it says is silly, but of the form that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.mesh import Mesh, NodeSpec, running_mesh

MODEL = "smollm2-135m"
NODES = [NodeSpec("node-0", "500MB", tracker_node=True), NodeSpec("node-1", "175MB")]
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about a cat in JSON."}]
MAX_TOKENS = 200


class Mood(StrEnum):
    HAPPY = "happy"
    SAD = "sad"
    SLEEPY = "sleepy"


class Owner(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=120)]


class Cat(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=12)]
    lives: Annotated[int, Field(ge=1, le=9)]
    mood: Mood
    is_indoor: bool
    owner: Owner | None


@pytest.fixture(scope="module")
def mesh(smollm2_gguf: Path) -> Iterator[Mesh]:
    with running_mesh([f"{MODEL}={smollm2_gguf}"], NODES, deploy=[MODEL], kv_tokens=8192, gateway=True) as running:
        yield running


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
    mesh.wait_until_idle()


def test_the_official_client_parses_what_was_said(client: openai.OpenAI) -> None:
    def cat(temperature: float, seed: int) -> Cat:
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=MESSAGES,
            response_format=Cat,
            temperature=temperature,
            seed=seed,
            max_tokens=MAX_TOKENS,
        )
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.parsed is not None
        return answer.choices[0].message.parsed

    assert cat(0, 1) == cat(0, 2)
    with ThreadPoolExecutor(4) as pool:
        cats = list(pool.map(lambda seed: cat(1.0, seed), range(8)))
    assert len({one.model_dump_json() for one in cats}) > 1
    assert cat(1.0, 3) == cats[3]


def test_what_is_streamed_is_the_same(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "temperature": 1.0,
        "seed": 5,
        "max_tokens": MAX_TOKENS,
    }
    whole = client.chat.completions.parse(**options, response_format=Cat).choices[0].message
    with client.chat.completions.stream(**options, response_format=Cat) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert whole.parsed == streamed.parsed is not None
    response = client.responses.parse(model=MODEL, input="a cat", text_format=Cat, max_output_tokens=MAX_TOKENS)
    assert isinstance(response.output_parsed, Cat)


def test_any_object_expressions_and_choices(client: openai.OpenAI) -> None:
    def said(prompt: str, **body: Any) -> str:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=MAX_TOKENS, extra_body=body, seed=1)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert said("Is water wet?", guided_choice=["yes", "no, not at all"]) in {"yes", "no, not at all"}
    assert re.fullmatch(r"\d{3}-\d{4}", said("Call me:", guided_regex=r"\d{3}-\d{4}"))
    assert said("Say", guided_grammar='start: "moo"') == "moo"
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=MAX_TOKENS
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    else:
        assert (answer.choices[0].message.content or "").startswith("{")


def test_a_bad_schema_is_refused_in_words(client: openai.OpenAI) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: objekt") as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=bad)
    assert caught.value.param == "response_format"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def check_calls(choice: Any) -> None:
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "now":
            assert arguments == {}
            continue
        assert call.function.name == "weather"
        assert set(arguments) == {"city", "unit", "days"}
        assert len(arguments["city"]) <= 12
        assert arguments["unit"] in {"C", "F"}
        assert arguments["days"] in range(1, 8)


def test_who_must_call_a_tool_does(client: openai.OpenAI) -> None:
    def choice(stream: bool = False, **more: Any) -> Any:
        options: Any = {"model": MODEL, "messages": ASKED, "tools": [WEATHER, NOW], "max_tokens": 1000, **more}
        if not stream:
            return client.chat.completions.create(**options).choices[0]
        with client.chat.completions.stream(**options) as events:
            return events.get_final_completion().choices[0]

    single: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    drawn: list[dict[str, Any]] = [{"temperature": 1.0, "seed": seed} for seed in range(4)]
    for options in ({"temperature": 0}, *drawn):
        whole, streamed = choice(**single, **options), choice(stream=True, **single, **options)
        for one in (whole, streamed):
            check_calls(one)
            assert len(one.message.tool_calls) == 1
        assert whole.message.tool_calls[0].function.arguments == streamed.message.tool_calls[0].function.arguments
    check_calls(choice(tool_choice="required", temperature=1.0, seed=1))
    named = choice(tool_choice={"type": "function", "function": {"name": "weather"}}, temperature=0)
    check_calls(named)
    assert {call.function.name for call in named.message.tool_calls} == {"weather"}


def test_a_conversation_goes_on_behind_calls(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    said: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It rains."},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=said, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=30
    )
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls
