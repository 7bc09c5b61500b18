"""What a request says of the form of its text: `response_format`, and vLLM's names for it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from meshnet.grammars import GrammarKind
from services.gateway.api.parsing import out_of_range
from services.gateway.grammars import ANY_OBJECT, Grammar, choice_grammar, json_grammar

MAX_CHOICE_TEXTS = 1024

ChoiceTexts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=MAX_CHOICE_TEXTS)
]
# vLLM takes a schema also as the text of one.
Schema = dict[str, Any] | str


class _Form(BaseModel):
    # "schema" is a name that pydantic has a method of.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class JsonSchema(_Form):
    """Without a schema, any object."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Form):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self, param: str) -> Grammar | None:
        """Raises ApiError (400)."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_grammar(ANY_OBJECT, param)
        if self.json_schema is None:
            raise out_of_range(param, "it needs 'json_schema' for the type 'json_schema'")
        return json_grammar(ANY_OBJECT if self.json_schema.schema_ is None else self.json_schema.schema_, param)


class TextFormat(_Form):
    """`text.format` of responses: the same without the nesting."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def grammar(self, param: str) -> Grammar | None:
        """Raises ApiError (400)."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_grammar(ANY_OBJECT, param)
        if self.name is None or self.schema_ is None:
            raise out_of_range(param, "it needs 'name' and 'schema' for the type 'json_schema'")
        return json_grammar(self.schema_, param)


class StructuredOutputs(_Form):
    """vLLM's. One of them."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: ChoiceTexts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(BaseModel):
    """Fields of requests that say what the text must be: one of them at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: str | None = None

    def form(self) -> Grammar | None:
        """What is asked for. Raises ApiError (400), also if it is more than one thing."""
        asked = [grammar for grammar in self._forms() if grammar is not None]
        if len(asked) > 1:
            others = " and ".join(repr(grammar.param) for grammar in asked)
            raise out_of_range(asked[1].param, f"the text cannot be kept to {others} at once")
        return asked[0] if asked else None

    def _forms(self) -> list[Grammar | None]:
        inner = self.structured_outputs or StructuredOutputs()
        name = "structured_outputs"
        return [
            self.response_format.grammar("response_format") if self.response_format else None,
            _json(inner.json_, name),
            json_grammar(ANY_OBJECT, name) if inner.json_object else None,
            _regex(inner.regex, name),
            _choice(inner.choice, name),
            _lark(inner.grammar, name),
            _json(self.guided_json, "guided_json"),
            _regex(self.guided_regex, "guided_regex"),
            _choice(self.guided_choice, "guided_choice"),
            _lark(self.guided_grammar, "guided_grammar"),
        ]


def _json(schema: Schema | None, param: str) -> Grammar | None:
    if isinstance(schema, str):
        try:
            return json_grammar(json.loads(schema), param)
        except (ValueError, RecursionError) as error:
            raise out_of_range(param, f"the schema is not JSON: {error}") from None
    return None if schema is None else json_grammar(schema, param)


def _regex(text: str | None, param: str) -> Grammar | None:
    return None if text is None else Grammar(GrammarKind.REGEX, text, param)


def _choice(texts: list[str] | None, param: str) -> Grammar | None:
    return None if texts is None else choice_grammar(texts, param)


def _lark(text: str | None, param: str) -> Grammar | None:
    return None if text is None else Grammar(GrammarKind.LARK, text, param)
