"""The choices of a request: one generation for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from services.gateway.api.parsing import out_of_range
from services.gateway.api.sampling import SamplingRequest
from services.gateway.choice import CallOutput, Choice
from services.gateway.generation import Form, Generation, Sampling
from services.gateway.limits import max_new_tokens
from services.gateway.prompts import Target, TokenPrompt, check_token_ids
from services.gateway.text_output import TextOutput
from services.gateway.tools.calls import ToolsAsked
from services.gateway.tools.parser import CallParser

# The mesh takes a probability above 0, or 0 for all tokens; to clients 0 is the smallest set there is, one token.
_SMALLEST_TOP_P = 1e-6


def prepared_choices(
    request: SamplingRequest,
    asked: int | None,
    prompts: Sequence[TokenPrompt],
    stop_token_ids: Collection[int],
    target: Target,
    new_id: Callable[[], str],
    form: Form | None = None,
    tools: ToolsAsked | None = None,
) -> list[Choice]:
    """In the order of the answer: all choices of the first prompt, then those of the next. Raises ApiError (400)."""
    _check_vocabulary(request, target)
    ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(stop_token_ids))
    num_choices = request.num_choices
    num_all = num_choices * len(prompts)
    choices = []
    for prompt_index, prompt in enumerate(prompts):
        budget = _budget(request, asked, prompt, target, num_all)
        for index in range(prompt_index * num_choices, (prompt_index + 1) * num_choices):
            generation = Generation(
                request_id=new_id(),
                model_id=request.model,
                prompt_token_ids=prompt.token_ids,
                max_new_tokens=budget,
                sampling=_sampling(request, index),
                stop_token_ids=tuple(sorted(ends)),
                top_logprobs=request.top_logprobs_asked,
                prompt_logprobs=prompt.echo is not None and request.top_logprobs_asked is not None,
                form=form,
            )
            output = TextOutput(
                target.tokenizer.decode if tools is None else target.tokenizer.decode_with_markers,
                ends,
                request.stops,
                min_tokens=request.min_tokens,
                context=prompt.context,
                offset=len(prompt.echo.text) if prompt.echo is not None else 0,
            )
            calls = None if tools is None else _call_output(tools, target)
            choices.append(Choice(index, prompt_index, generation, output, prompt.echo, calls))
    return choices


def _call_output(tools: ToolsAsked, target: Target) -> CallOutput:
    names = [tool["function"]["name"] for tool in tools.tools]
    parser = CallParser(target.tokenizer.convention.writing, names)
    return CallOutput(parser, is_parallel=tools.is_parallel)


def _budget(request: SamplingRequest, asked: int | None, prompt: TokenPrompt, target: Target, num_choices: int) -> int:
    model = target.model
    budget = max_new_tokens(
        len(prompt.token_ids), asked, model.context_length, model.kv_tokens, prompt.param, num_choices
    )
    if request.min_tokens > budget:
        raise out_of_range("min_tokens", f"it may not be above {budget}, the most tokens that there will be")
    return budget


def _sampling(request: SamplingRequest, index: int) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_p=max(request.top_p, _SMALLEST_TOP_P),
        top_k=max(request.top_k, 0),
        # Each choice draws its own way, and the first as a request for one would.
        seed=None if request.seed is None else (request.seed + index) % 2**64,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        min_new_tokens=request.min_tokens,
    )


def _check_vocabulary(request: SamplingRequest, target: Target) -> None:
    vocab_size = target.model.manifest.vocab_size
    for token_id in request.logit_bias:
        if token_id >= vocab_size:
            reason = f"the key '{token_id}' is not a token id of this model, which are below {vocab_size}"
            raise out_of_range("logit_bias", reason)
    check_token_ids(request.stop_token_ids, target.model, "stop_token_ids")
