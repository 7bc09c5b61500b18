"""`POST /tokenize` and `POST /detokenize`, as vLLM's."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field

from services.gateway.api.chat import Messages
from services.gateway.api.parsing import ApiRequest, Neutral, out_of_range
from services.gateway.api.sampling import TokenId
from services.gateway.api.tools import MAX_TOOLS, Tool
from services.gateway.api_errors import invalid


class TokenizeRequest(ApiRequest):
    """A text, or a conversation. By default a text gets the special tokens that begin one; in a conversation the chat
    template writes them."""

    model: str
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    not_supported: ClassVar[Neutral] = MappingProxyType(
        {
            "chat_template": (),
            "chat_template_kwargs": ({},),
            "continue_final_message": (False,),
            "add_generation_prompt": (True,),
        }
    )

    def check_together(self) -> None:
        super().check_together()
        if self.prompt is None and self.messages is None:
            message = "Missing required parameter: 'prompt' or 'messages'."
            raise invalid(message, "prompt", "missing_required_parameter")
        if self.prompt is not None and self.messages is not None:
            raise out_of_range("messages", "there may be 'prompt' or 'messages', not both")


class DetokenizeRequest(ApiRequest):
    model: str
    tokens: Annotated[list[TokenId], Field(max_length=2**20, fail_fast=True)]
