"""Logprobs as the two endpoints show them.

A token is shown as its text. One that is only part of a character has none: it is shown as `bytes:` and its bytes,
each as `\\x` and two hexadecimal digits, as OpenAI does; where an object has `bytes`, these are always right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from services.gateway.text_output import TokenEntry

TokenBytes = Callable[[int], bytes]

# What the API shows for a probability of nothing: JSON has no infinity.
SMALLEST_LOGPROB = -9999.0


def token_text(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(tokens: Sequence[TokenEntry], token_bytes: TokenBytes) -> dict[str, Any]:
    """`choices[].logprobs` of a chat. A stop token is no part of the content and is left out."""
    content = []
    for token in tokens:
        if token.is_stop or token.logprobs is None:
            continue
        top = [_chat_token(token_id, logprob, token_bytes) for token_id, logprob in token.logprobs.top]
        own = _chat_token(token.token_id, token.logprobs.logprob, token_bytes)
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenEntry], token_bytes: TokenBytes) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. A stop token is the last, as of the end of the text."""
    return {
        "tokens": [token_text(token_bytes(token.token_id)) for token in tokens],
        "token_logprobs": [None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens],
        "top_logprobs": [_top(token, token_bytes) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def finite(logprob: float) -> float:
    return logprob if logprob > SMALLEST_LOGPROB else SMALLEST_LOGPROB


def _chat_token(token_id: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    own = token_bytes(token_id)
    return {"token": token_text(own), "logprob": finite(logprob), "bytes": list(own)}


def _top(token: TokenEntry, token_bytes: TokenBytes) -> dict[str, float] | None:
    """The likeliest and the token itself, which may be one of them. Of two with one text the likelier counts."""
    if token.logprobs is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
        top.setdefault(token_text(token_bytes(token_id)), finite(logprob))
    return top
