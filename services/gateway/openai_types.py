"""Requests of the OpenAI API, checked.

A field that is null is a field that is absent, and unknown fields are ignored. What would change the answer and is
not supported is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from services.gateway.api_errors import ApiError, invalid

MAX_STOP_STRINGS = 16
# Checking holds up all other requests, about 3 microseconds a message.
MAX_MESSAGES = 16_384

StopString = Annotated[str, Field(min_length=1, max_length=1024)]

# Fields that are not supported, with the values of theirs that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "stop_token_ids": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints have in common."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool = False

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """From a request's body. Raises ApiError (400)."""
        fields = _fields(body)
        _check_supported(fields)
        try:
            return cls.model_validate(fields)
        except pydantic.ValidationError as error:
            raise _api_error(error) from None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _prompt(value: Any) -> str | list[int]:
    """A prompt: text or token ids, or a list of one of these. Checked by hand: a union would list a fault a token."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("only one prompt a request is supported; send a request for each")
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(token_id) is int and 0 <= token_id < 2**32 for token_id in value):
        raise ValueError("it must be a string or a list of token ids")
    return value


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    @property
    def template_fields(self) -> dict[str, str]:
        """The message as chat templates take it: they know no developer, and text only as one string."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @property
    def tokens_asked(self) -> int | None:
        """The newer of the two names counts, if both are given."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = pydantic_core.from_json(body)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return {name: value for name, value in fields.items() if value is not None}


def _check_supported(fields: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if name in fields and not any(_same(fields[name], value) for value in neutral):
            raise invalid(f"The parameter {name!r} is not supported{_hint(neutral)}.", name, "unsupported_parameter")
    for index, message in enumerate(fields["messages"] if isinstance(fields.get("messages"), list) else ()):
        if isinstance(message, dict) and (message.get("tool_calls") or message.get("role") in {"tool", "function"}):
            raise invalid("Tool calls are not supported.", f"messages[{index}]", "unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    """Equality in which 0 is 0.0, but false is not 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _hint(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(pydantic_core.to_json(value).decode() for value in neutral)
    return f" (only {values})" if neutral else ""


def _api_error(error: pydantic.ValidationError) -> ApiError:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the branches of a union, the one that was meant has its fault deepest.
    deepest = max(faults, key=lambda fault: len(_place(fault["loc"])))
    place = _place(deepest["loc"])
    if deepest["type"] == "missing":
        return invalid(f"Missing required parameter: {place!r}.", place, "missing_required_parameter")
    reasons = sorted({fault["msg"].removeprefix("Value error, ") for fault in faults if _place(fault["loc"]) == place})
    return invalid(f"Invalid value for {place!r}: {'; or '.join(reasons)}.", place, "invalid_value")


_NAMES = frozenset({"role", "content", "text", "type", "include_usage"})


def _place(loc: tuple[int | str, ...]) -> str:
    """`('messages', 0, 'role')` as `messages[0].role`, without the names of union branches."""
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in loc[1:]
        if isinstance(part, int) or part in _NAMES
    ]
    return str(loc[0]) + "".join(parts)
