"""Logprobs of tokens, as entry nodes tell them and gateways show them."""

from __future__ import annotations

from dataclasses import dataclass

# Of the likeliest tokens beside each token. As many as the OpenAI API has.
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token, natural logarithms of probabilities as the model gives them: before temperature, penalties and
    bias. `top`: the likeliest tokens with theirs, from the likeliest on, the lower id first among equals."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
