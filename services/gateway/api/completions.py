"""`POST /v1/completions`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator

from meshnet.logprobs import MAX_TOP_LOGPROBS
from services.gateway.api.parsing import Neutral, out_of_range
from services.gateway.api.sampling import MAX_CHOICES, ChoicesRequest, SamplingRequest

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """Text or token ids, or a list of these. Checked by hand: a union would list a fault a token."""
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > MAX_CHOICES:
        raise ValueError(f"there may be {MAX_CHOICES} prompts at most")
    kind = type(prompts[0])
    if not all(type(prompt) is kind and _is_prompt(prompt) for prompt in prompts):
        raise ValueError("it must be a string or a list of token ids, or a list of strings or of lists of token ids")
    return prompts


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(type(token_id) is int and 0 <= token_id < 2**32 for token_id in value)


class CompletionRequest(ChoicesRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[
        list[Prompt],
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    not_supported: ClassVar[Neutral] = MappingProxyType(
        {**SamplingRequest.not_supported, "max_completion_tokens": (), "top_logprobs": (0,)}
    )

    def check_together(self) -> None:
        super().check_together()
        if self.n * len(self.prompt) > MAX_CHOICES:
            raise out_of_range("n", f"{self.n} choices of each of {len(self.prompt)} prompts are over {MAX_CHOICES}")
        if self.max_tokens == 0 and not self.echo:
            raise out_of_range("max_tokens", "it must be at least 1, or 0 with 'echo'")

    @property
    def tokens_asked(self) -> int | None:
        return self.max_tokens

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.logprobs
