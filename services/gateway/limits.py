"""How many tokens a generation may have."""

from __future__ import annotations

from services.gateway.api_errors import ApiError, invalid

COMPLETION_DEFAULT_TOKENS = 16
# KV room is reserved for all tokens that a generation may have. A request that does not say how many gets this share of
# it at most, over all its choices, so that it does not keep the others waiting.
DEFAULT_KV_SHARE = 0.25
# However many choices there are, each gets as many of these as the share has.
DEFAULT_CHOICE_TOKENS = 256


def max_new_tokens(
    num_prompt_tokens: int, asked: int | None, context_length: int, kv_tokens: int, param: str, num_choices: int = 1
) -> int:
    """The most tokens to generate for each choice: as asked, else what there is room for beside others.

    `kv_tokens` is the KV cache that the mesh keeps for the model, 0 if it did not say. `param` is the field that holds
    the prompt. Raises ApiError (400).
    """
    if not num_prompt_tokens:
        raise invalid("The prompt is empty: it has no tokens.", param=param)
    least = 1 if asked is None else asked
    if num_prompt_tokens + least > context_length:
        raise too_long(context_length, str(num_prompt_tokens), least, param)
    if asked is not None:
        return asked
    kv_room = kv_tokens or context_length
    share = int(kv_room * DEFAULT_KV_SHARE)
    share = max(share // num_choices, min(share, DEFAULT_CHOICE_TOKENS))
    return max(1, min(context_length - num_prompt_tokens, kv_room - num_prompt_tokens, share))


def too_long(context_length: int, num_prompt_tokens: str, wanted: int, param: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {context_length} tokens. However, you requested {wanted} new tokens "
        f"after a prompt of {num_prompt_tokens} tokens. Shorten the prompt or ask for fewer tokens.",
        param=param,
        code="context_length_exceeded",
    )
