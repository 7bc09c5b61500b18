"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from meshnet.grammars import GrammarKind
from meshnet.logprobs import MAX_TOP_LOGPROBS
from services.gateway.api.parsing import Neutral, out_of_range, unsupported
from services.gateway.api.sampling import ChoicesRequest, NumTokens, SamplingRequest
from services.gateway.api.tools import MAX_CALLS, CallOfBefore, ToolFields

# Checking holds up all other requests, about 3 microseconds a message.
MAX_MESSAGES = 16_384


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["text"]
    text: str


class HasText(Protocol):
    @property
    def text(self) -> str: ...


def template_fields(role: str, content: str | Sequence[HasText] | None) -> dict[str, Any]:
    """A message as chat templates take it: they know no developer, and text only as one string."""
    content = content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return {"role": "system" if role == "developer" else role, "content": text}


class Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[CallOfBefore], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None

    @property
    def template_fields(self) -> dict[str, Any]:
        """With its calls. Raises ValueError for arguments of calls that are no JSON objects."""
        fields = template_fields(self.role, self.content)
        if self.role == "assistant" and self.tool_calls:
            fields["tool_calls"] = [call.template_fields for call in self.tool_calls]
        if self.role == "tool":
            fields["tool_call_id"] = self.tool_call_id or ""
        return fields


def template_messages(messages: Sequence[Message]) -> tuple[Mapping[str, Any], ...]:
    """All of them as chat templates take them: results of tools have the names of these. Raises ApiError (400)."""
    names: dict[str, str] = {}
    found = []
    for index, message in enumerate(messages):
        try:
            fields = message.template_fields
        except (ValueError, RecursionError) as error:
            raise out_of_range(f"messages[{index}].tool_calls", f"'arguments' must be a JSON object: {error}") from None
        names |= {call["id"]: call["function"]["name"] for call in fields.get("tool_calls", ())}
        if message.role == "tool" and fields["tool_call_id"] in names:
            fields["name"] = names[fields["tool_call_id"]]
        found.append(fields)
    return tuple(found)


_TOOLS = frozenset({"tools", "tool_choice"})
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(ChoicesRequest, ToolFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: NumTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    not_supported: ClassVar[Neutral] = MappingProxyType(
        {
            **{name: value for name, value in SamplingRequest.not_supported.items() if name not in _TOOLS},
            "echo": (False,),
        }
    )

    def check_together(self) -> None:
        super().check_together()
        if self.tokens_asked == 0:
            raise out_of_range(self.tokens_param, "it must be at least 1")
        if self.top_logprobs and not self.logprobs:
            raise out_of_range("top_logprobs", "it needs 'logprobs' to be true")
        asked, grammar = self.tools_asked(), self.grammar
        if asked and not asked.must_call and grammar and grammar.kind is not GrammarKind.JSON_SCHEMA:
            raise unsupported(f"Tools that may be called do not go together with {grammar.param!r}.", grammar.param)

    @property
    def tokens_asked(self) -> int | None:
        """The newer of the two names counts, if both are given."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def tokens_param(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.top_logprobs if self.logprobs else None
