"""The messages of a generation as protobuf, at the edge where they leave and arrive."""

from __future__ import annotations

from meshnet.grammars import GrammarKind
from meshnet.logprobs import TokenLogprobs
from meshnet.v1 import inference_pb2
from meshnet.vocabulary import Vocabulary
from services.gateway.generation import FinishReason, Form, Generation, Sampling, TokenEvent

_FINISH = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def to_proto(generation: Generation) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=generation.request_id,
        model_id=generation.model_id,
        prompt_token_ids=generation.prompt_token_ids,
        max_new_tokens=generation.max_new_tokens,
        sampling=_sampling(generation.sampling),
        stop_token_ids=generation.stop_token_ids,
        top_logprobs=generation.top_logprobs,
        prompt_logprobs=generation.prompt_logprobs,
        num_generated=generation.num_generated,
        grammar=None if generation.form is None else _grammar(generation.form),
    )


def _grammar(form: Form) -> inference_pb2.Grammar:
    kind, text = form.grammar.kind, form.grammar.text
    return inference_pb2.Grammar(
        json_schema=text if kind is GrammarKind.JSON_SCHEMA else None,
        lark=text if kind is GrammarKind.LARK else None,
        regex=text if kind is GrammarKind.REGEX else None,
        vocabulary_id=form.vocabulary.vocabulary_id,
    )


def vocabulary_to_proto(vocabulary: Vocabulary) -> inference_pb2.Vocabulary:
    return inference_pb2.Vocabulary(
        vocabulary_id=vocabulary.vocabulary_id,
        tokens=vocabulary.tokens,
        special_token_ids=vocabulary.special_token_ids,
    )


def _sampling(sampling: Sampling) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_new_tokens=sampling.min_new_tokens,
    )


def from_proto(message: inference_pb2.GenerateEvent) -> TokenEvent:
    return TokenEvent(
        token_id=message.token_id if message.HasField("token_id") else None,
        finish_reason=_FINISH.get(message.finish_reason),
        cached_tokens=message.cached_tokens,
        logprobs=_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        prompt_logprobs=tuple(_logprobs(logprobs) for logprobs in message.prompt_logprobs),
    )


def _logprobs(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=False)))
