"""What all requests that generate have in common."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from services.gateway.api.parsing import ApiRequest, Neutral, out_of_range, unsupported
from services.gateway.api.structured import StructuredFields
from services.gateway.grammars import Grammar

MAX_STOP_STRINGS = 16
# Choices of one request, over all its prompts.
MAX_CHOICES = 128
MAX_LOGIT_BIASES = 1024

StopString = Annotated[str, Field(min_length=1, max_length=1024)]
NumTokens = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_LogitBias = dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False


def _logit_bias(value: Any) -> dict[int, float]:
    """By token id, from JSON's keys. Checked by hand, so that the fault names the key."""
    if not isinstance(value, dict):
        raise ValueError("it must be an object of token ids and numbers")  # noqa: TRY004 - what pydantic takes
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"it may have {MAX_LOGIT_BIASES} entries at most")
    for key, bias in value.items():
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"the key {str(key)[:40]!r} is not a token id")
        if type(bias) not in {int, float} or not -100 <= bias <= 100:
            raise ValueError(f"the value of {key!r} must be a number from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


class SamplingRequest(ApiRequest):
    """How tokens are chosen, when they end, and how the answer travels. Of the extensions of the OpenAI API, vLLM's."""

    model: str
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=_LogitBias)] = Field(
        default_factory=dict
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] = Field(default_factory=list)
    min_tokens: NumTokens = 0
    ignore_eos: bool = False

    not_supported: ClassVar[Neutral] = MappingProxyType(
        {
            "prompt_logprobs": (0, False),
            "suffix": ("",),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "modalities": (["text"],),
            "audio": (),
            "prediction": (),
            "web_search_options": (),
            "chat_template": (),
            "chat_template_kwargs": ({},),
            "continue_final_message": (False,),
            "add_generation_prompt": (True,),
            "use_beam_search": (False,),
            "include_stop_str_in_output": (False,),
            "skip_special_tokens": (True,),
            "truncate_prompt_tokens": (),
            "allowed_token_ids": ([],),
            "bad_words": ([],),
            "return_tokens_as_token_ids": (False,),
        }
    )

    def check_together(self) -> None:
        super().check_together()
        if self.tokens_asked is not None and self.min_tokens > self.tokens_asked:
            raise out_of_range("min_tokens", f"it may not be above {self.tokens_param!r}, which is {self.tokens_asked}")

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def tokens_asked(self) -> int | None:
        """The most tokens that the client wants of each choice."""
        raise NotImplementedError

    @property
    def tokens_param(self) -> str:
        """The name of the field that `tokens_asked` came from."""
        return "max_tokens"

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return 1

    @property
    def grammar(self) -> Grammar | None:
        """What the text must be. Raises ApiError (400) for what makes no sense."""
        return None

    @property
    def top_logprobs_asked(self) -> int | None:
        """How many of the likeliest tokens the client wants to know of each position; None: no logprobs."""
        return None


class ChoicesRequest(SamplingRequest, StructuredFields):
    """What completions and chat completions have, and newer endpoints have not."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    max_tokens: NumTokens | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_choices(self) -> int:
        return self.n

    def check_together(self) -> None:
        super().check_together()
        if self.best_of not in {None, self.n}:
            raise unsupported("The parameter 'best_of' is not supported (only what 'n' is).", "best_of")
        # Raises what there is against it.
        self.form()

    @property
    def grammar(self) -> Grammar | None:
        return self.form()
