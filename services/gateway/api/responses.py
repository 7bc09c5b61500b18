"""`POST /v1/responses`: text only, and nothing is kept for later."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from meshnet.logprobs import MAX_TOP_LOGPROBS
from services.gateway.api.chat import MAX_MESSAGES, template_fields
from services.gateway.api.parsing import Neutral, out_of_range, unsupported
from services.gateway.api.sampling import SamplingRequest
from services.gateway.api.structured import TextFormat
from services.gateway.grammars import Grammar

LOGPROBS = "message.output_text.logprobs"
_GUIDED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
Metadata = Annotated[dict[str, str], Field(max_length=16)]


class InputPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(BaseModel):
    """What somebody said, or a message of an earlier answer's output."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputPart], Field(fail_fast=True)]


class TextOptions(BaseModel):
    """`verbosity` is as the model has it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingRequest):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    metadata: Metadata = Field(default_factory=dict)
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    not_supported: ClassVar[Neutral] = MappingProxyType(
        {
            **SamplingRequest.not_supported,
            "background": (False,),
            "best_of": (1,),
            "echo": (False,),
            "logprobs": (False,),
            "max_completion_tokens": (),
            "max_tokens": (),
            "messages": (),
            "n": (1,),
            "context_management": ([],),
            "conversation": (),
            "moderation": (),
            "prompt": (),
            "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
            "truncation": ("disabled",),
            **dict.fromkeys(("response_format", *_GUIDED), ()),
        }
    )

    @classmethod
    def check_supported(cls, fields: Mapping[str, Any]) -> None:
        if "previous_response_id" in fields:
            message = (
                "This server keeps no responses, so 'previous_response_id' names none: send what was said as 'input'."
            )
            raise unsupported(message, "previous_response_id")
        super().check_supported(fields)
        for index, item in enumerate(fields["input"] if isinstance(fields.get("input"), list) else ()):
            kind = item.get("type", "message") if isinstance(item, dict) else "message"
            if kind != "message":
                raise unsupported(f"Input items of type {str(kind)[:80]!r} are not supported.", f"input[{index}]")

    def check_together(self) -> None:
        super().check_together()
        if self.top_logprobs and not self.include:
            raise out_of_range("top_logprobs", f"it needs {LOGPROBS!r} in 'include'")
        if self.text.verbosity not in {None, "medium"}:
            raise unsupported("The parameter 'text.verbosity' is not supported (only \"medium\").", "text.verbosity")
        _ = self.grammar

    @property
    def grammar(self) -> Grammar | None:
        return self.text.format.grammar("text.format") if self.text.format else None

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        before = [] if self.instructions is None else [template_fields("system", self.instructions)]
        if isinstance(self.input, str):
            return [*before, template_fields("user", self.input)]
        return [*before, *(template_fields(item.role, item.content) for item in self.input)]

    @property
    def tokens_asked(self) -> int | None:
        return self.max_output_tokens

    @property
    def tokens_param(self) -> str:
        return "max_output_tokens"

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.top_logprobs if self.include else None
