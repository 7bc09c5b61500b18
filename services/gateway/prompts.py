"""From the prompts of requests to token ids. The work is done in threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.errors import InvalidRequest
from meshnet.topology import DeployedModel
from services.gateway.api.completions import CompletionRequest, Prompt
from services.gateway.api.parsing import out_of_range
from services.gateway.api_errors import invalid
from services.gateway.choice import Echo
from services.gateway.limits import too_long
from services.gateway.tokenization import ModelTokenizer
from services.gateway.tokenizers_store import TokenizerStore
from services.gateway.tools.conversation import Conversation

# Tokens of the prompt that the first new ones are decoded behind: more than a character has bytes.
_NUM_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is asked."""

    model: DeployedModel
    tokenizer: ModelTokenizer


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as the mesh takes it. `param` is the field that it came from; `context` the tokens whose text the answer
    goes on with."""

    token_ids: tuple[int, ...]
    param: str
    echo: Echo | None = None
    context: tuple[int, ...] = ()


async def completion_prompts(
    request: CompletionRequest, wanted: int, target: Target, tokenizers: TokenizerStore
) -> list[TokenPrompt]:
    """Raises ApiError (400). `wanted` is how many tokens are asked for, for the message."""
    params = [f"prompt[{i}]" if len(request.prompt) > 1 else "prompt" for i in range(len(request.prompt))]
    for prompt, param in zip(request.prompt, params, strict=True):
        if isinstance(prompt, str):
            check_length(prompt, wanted, target, param)
        else:
            check_token_ids(prompt, target.model, param)
    tokenize = _echoed if request.echo else _plain
    return await tokenizers.run(
        lambda: [
            tokenize(prompt, param, target.tokenizer) for prompt, param in zip(request.prompt, params, strict=True)
        ]
    )


async def chat_prompt(
    conversation: Conversation,
    wanted: int,
    param: str,
    target: Target,
    tokenizers: TokenizerStore,
    *,
    special_tokens: bool = False,
) -> TokenPrompt:
    """Raises ApiError (400)."""
    tokenizer = target.tokenizer
    check_num_chars(conversation.num_chars, wanted, target, param)
    try:
        # The template writes BOS itself where it belongs: a tokenizer that adds its own would double it.
        token_ids = await tokenizers.run(
            lambda: tokenizer.encode(tokenizer.render_chat(conversation), special_tokens=special_tokens)
        )
    except InvalidRequest as error:
        raise invalid(f"Invalid {param!r}: {error}", param, "chat_template_error") from error
    return TokenPrompt(tuple(token_ids), param)


def check_length(text: str, wanted: int, target: Target, param: str) -> None:
    """Refuses, untokenized, a text that is too long even if it were all the longest tokens."""
    check_num_chars(len(text), wanted, target, param)


def check_num_chars(num_chars: int, wanted: int, target: Target, param: str) -> None:
    context_length = target.model.context_length
    fewest = math.ceil(num_chars / target.tokenizer.max_token_chars)
    if fewest > context_length:
        raise too_long(context_length, f"at least {fewest}", wanted, param)


def check_token_ids(token_ids: Sequence[int], model: DeployedModel, param: str) -> None:
    vocab_size = model.manifest.vocab_size
    wrong = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if wrong is not None:
        raise out_of_range(param, f"{wrong} is not a token id of this model, which are below {vocab_size}")


def _plain(prompt: Prompt, param: str, tokenizer: ModelTokenizer) -> TokenPrompt:
    token_ids = tokenizer.encode(prompt, special_tokens=True) if isinstance(prompt, str) else prompt
    return TokenPrompt(tuple(token_ids), param, context=tuple(token_ids[-_NUM_CONTEXT:]))


def _echoed(prompt: Prompt, param: str, tokenizer: ModelTokenizer) -> TokenPrompt:
    if isinstance(prompt, str):
        text = prompt
        token_ids, offsets = tokenizer.encode_with_offsets(prompt)
    else:
        token_ids = prompt
        text, offsets = tokenizer.decode_with_offsets(prompt)
    echo = Echo(text, tuple(token_ids), tuple(offsets))
    return TokenPrompt(tuple(token_ids), param, echo, context=tuple(token_ids[-_NUM_CONTEXT:]))
