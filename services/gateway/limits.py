"""How many tokens a generation may have."""

from __future__ import annotations

from services.gateway.api_errors import ApiError, invalid

COMPLETION_DEFAULT_TOKENS = 16


def max_new_tokens(
    num_prompt_tokens: int, asked: int | None, default: int | None, context_length: int, kv_tokens: int, param: str
) -> int:
    """The most tokens to generate: as asked, else the default, else all that there is room for.

    `kv_tokens` is the KV cache that the mesh keeps for the model, 0 if it did not say. `param` is the field that holds
    the prompt. Raises ApiError (400).
    """
    if not num_prompt_tokens:
        raise invalid("The prompt is empty: it has no tokens.", param=param)
    wanted = asked if asked is not None else default
    if num_prompt_tokens + (wanted or 1) > context_length:
        raise too_long(context_length, str(num_prompt_tokens), wanted or 1, param)
    if wanted is not None:
        return wanted
    room = min(context_length, kv_tokens) if kv_tokens else context_length
    return max(1, room - num_prompt_tokens)


def too_long(context_length: int, num_prompt_tokens: str, wanted: int, param: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {context_length} tokens. However, you requested {wanted} new tokens "
        f"after a prompt of {num_prompt_tokens} tokens. Shorten the prompt or ask for fewer tokens.",
        param=param,
        code="context_length_exceeded",
    )
