"""What a request says of the form of its text, and how the mesh is asked for it."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel

from meshnet.errors import InvalidGrammar, InvalidRequest
from meshnet.grammars import GrammarKind
from meshnet.vocabulary import Vocabulary, check_vocabulary
from services.gateway.api.chat import ChatRequest
from services.gateway.api.completions import CompletionRequest
from services.gateway.api.responses import ResponsesRequest
from services.gateway.api_errors import ApiError
from services.gateway.grammars import Grammar
from services.gateway.tokenization import ModelTokenizer
from tests.services.gateway.conftest import END
from tests.services.gateway.fake_mesh import VOCAB_SIZE, FakeMesh, tokens, tokens_then_fail
from tests.services.gateway.gateway_process import Gateway

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HI: list[Any] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Grammar | None:
    return ChatRequest.parse(json.dumps({"model": "m", "messages": HI, **fields}).encode()).grammar


def completion(**fields: Any) -> Grammar | None:
    return CompletionRequest.parse(json.dumps({"model": "m", "prompt": "x", **fields}).encode()).grammar


def response(**fields: Any) -> Grammar | None:
    return ResponsesRequest.parse(json.dumps({"model": "m", "input": "x", **fields}).encode()).grammar


def schema_of(grammar: Grammar | None) -> Any:
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    schema = json.loads(grammar.text)
    assert schema.pop("x-guidance")["whitespace_flexible"] is False
    return schema


NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def test_a_form_is_the_same_by_all_its_names() -> None:
    for parse in (chat, completion):
        assert schema_of(parse(response_format=NAMED)) == SCHEMA
        assert schema_of(parse(guided_json=SCHEMA)) == SCHEMA
        assert schema_of(parse(guided_json=json.dumps(SCHEMA))) == SCHEMA
        assert schema_of(parse(structured_outputs={"json": SCHEMA})) == SCHEMA
        for named in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
            assert schema_of(parse(**named)) == {"type": "object"}
        assert parse(guided_regex="a+") == Grammar(GrammarKind.REGEX, "a+", "guided_regex")
        assert parse(structured_outputs={"regex": "a+"}) == Grammar(GrammarKind.REGEX, "a+", "structured_outputs")
        assert parse(guided_grammar="start: A") == Grammar(GrammarKind.LARK, "start: A", "guided_grammar")
        assert parse(structured_outputs={"grammar": "x"}) == Grammar(GrammarKind.LARK, "x", "structured_outputs")
        assert parse() is parse(response_format={"type": "text"}) is None
    assert schema_of(response(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}})) == SCHEMA
    assert schema_of(response(text={"format": {"type": "json_object"}})) == {"type": "object"}
    assert response() is response(text={"format": {"type": "text"}, "verbosity": "medium"}) is None


def test_a_schema_that_says_how_white_space_is_to_be_stays_as_it_is() -> None:
    schema = {**SCHEMA, "x-guidance": {"whitespace_flexible": True}}
    grammar = chat(guided_json=schema)
    assert grammar is not None
    assert json.loads(grammar.text) == schema


CHOICES = ["yes", 'no "quotes"', "back\\slash", "line\nbreak", "日本 😀", "/"]


def test_choices_are_a_grammar_of_just_these() -> None:
    grammar = chat(guided_choice=CHOICES)
    assert grammar == Grammar(GrammarKind.LARK, grammar.text if grammar else "", "guided_choice")
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.text)) == ""
    again = chat(structured_outputs={"choice": CHOICES})
    assert again is not None
    assert again.text == grammar.text


@pytest.mark.parametrize(
    ("parse", "param", "fields"),
    [
        (chat, "response_format", {"response_format": {"type": "json_schema"}}),
        (chat, "response_format.type", {"response_format": {"type": "xml"}}),
        (chat, "response_format", {"response_format": 5}),
        (chat, "response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}),
        (chat, "guided_json", {"guided_json": "{"}),
        (chat, "guided_json", {"guided_json": "[" * 100_000}),
        (chat, "guided_json", {"guided_json": 5}),
        (chat, "guided_choice", {"guided_choice": []}),
        (chat, "guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        (completion, "structured_outputs", {"structured_outputs": {"regex": "a", "grammar": "x"}}),
        (response, "text.format", {"text": {"format": {"type": "json_schema"}}}),
        (response, "text", {"text": {"format": {"type": "xml"}}}),
        (response, "text", {"text": 5}),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(parse: Any, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(param)


def test_an_entry_node_is_given_the_vocabulary_once(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    mesh.a.vocabularies.clear()
    mesh.a.script = tokens(81, END)
    for _ in range(2):
        answer = client.chat.completions.create(model="smol", messages=HI, response_format={"type": "json_object"})
        assert answer.choices[0].message.content == "a"
    assert len(mesh.a.requests) == 2
    (given,) = mesh.a.vocabularies.values()
    vocabulary = Vocabulary(given.vocabulary_id, tuple(given.tokens), tuple(given.special_token_ids))
    check_vocabulary(vocabulary)
    assert len(vocabulary.tokens) == VOCAB_SIZE
    assert set(tokenizer.chat_stop_token_ids) <= set(vocabulary.special_token_ids)
    text = "Über\n\t日本 😀 don't"
    token_ids = tokenizer.encode(text, special_tokens=False)
    assert b"".join(vocabulary.tokens[token_id] for token_id in token_ids).decode() == text
    assert mesh.a.requests[0].grammar.vocabulary_id == given.vocabulary_id
    assert json.loads(mesh.a.requests[0].grammar.json_schema)["type"] == "object"


def test_where_nothing_is_asked_there_is_no_grammar(client: openai.OpenAI, mesh: FakeMesh) -> None:
    client.chat.completions.create(model="smol", messages=HI, response_format={"type": "text"})
    assert not mesh.a.requests[0].HasField("grammar")


def test_all_choices_have_the_form(client: openai.OpenAI, mesh: FakeMesh) -> None:
    client.completions.create(model="smol", prompt=["a", "b"], n=2, extra_body={"guided_regex": "a+"})
    assert [request.grammar.regex for request in mesh.a.requests] == ["a+"] * 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("chat/completions", "response_format", {"messages": HI, "response_format": NAMED}),
        ("completions", "guided_regex", {"prompt": "x", "guided_regex": "("}),
        ("responses", "text.format", {"input": "x", "text": {"format": {"type": "json_object"}}}),
    ],
)
def test_a_grammar_that_nodes_refuse_is_a_400_that_names_the_field(
    gateway: Gateway, mesh: FakeMesh, path: str, param: str, body: dict[str, Any], stream: bool
) -> None:
    # Its tokens are read once, which may take longer than a stream is silent.
    mesh.a.script = tokens(END)
    httpx.post(f"{gateway.url}/v1/{path}", json={"model": "smol", **body}).raise_for_status()
    mesh.a.script = tokens_then_fail(InvalidGrammar("the schema cannot be used: Invalid type: objekt"))
    answer = httpx.post(f"{gateway.url}/v1/{path}", json={"model": "smol", "stream": stream, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_grammar")
    assert "Invalid type: objekt" in error["message"]
    # Other faults are not of that field.
    mesh.a.script = tokens_then_fail(InvalidRequest("too long"))
    error = httpx.post(f"{gateway.url}/v1/{path}", json={"model": "smol", "stream": stream, **body}).json()["error"]
    assert error["param"] is None


class Color(StrEnum):
    RED = "red"


class Answer(BaseModel):
    color: Color
    ready: bool


def test_the_parse_helpers_of_the_official_client_work(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    text = '{"color": "red", "ready": true}'
    mesh.a.script = tokens(*tokenizer.encode(text, special_tokens=False), END)
    parsed = client.chat.completions.parse(model="smol", messages=HI, response_format=Answer).choices[0].message.parsed
    assert parsed == Answer(color=Color.RED, ready=True)
    response = client.responses.parse(model="smol", input="x", text_format=Answer)
    assert response.output_parsed == parsed
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    first, second = (json.loads(request.grammar.json_schema) for request in mesh.a.requests)
    assert first == second
    assert first["required"] == ["color", "ready"]
