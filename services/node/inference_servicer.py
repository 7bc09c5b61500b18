"""The gRPC face of an entry node. It only translates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from meshnet.errors import InvalidGrammar, InvalidRequest
from meshnet.grammars import GrammarKind
from meshnet.logprobs import TokenLogprobs
from meshnet.model import check_model_id
from meshnet.rpc import translates_errors, translates_stream_errors
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from meshnet.vocabulary import Vocabulary
from meshnet.wire import parse_session
from services.node.core.request import Emitted, FinishReason, GenerationRequest, Grammar
from services.node.core.work import Sampling
from services.node.entry import EntryPoint

_FINISH = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """meshnet.v1.Inference."""

    def __init__(self, entry: EntryPoint) -> None:
        self._entry = entry

    @translates_stream_errors
    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        finished = False
        async with aclosing(self._entry.generate(_request(request))) as events:
            async for event in events:
                finished = event.finish_reason is not None
                yield _event(event)
        if not finished:
            yield inference_pb2.GenerateEvent(finish_reason=inference_pb2.FINISH_REASON_ABORT)

    @translates_errors
    async def Abort(  # noqa: N802
        self, request: inference_pb2.AbortRequest, context: Any
    ) -> inference_pb2.AbortResponse:
        await self._entry.abort(_request_id(request.request_id))
        return inference_pb2.AbortResponse()

    @translates_errors
    async def PutVocabulary(  # noqa: N802
        self, request: inference_pb2.Vocabulary, context: Any
    ) -> inference_pb2.PutVocabularyResponse:
        special = tuple(request.special_token_ids)
        await self._entry.constraints.put(Vocabulary(request.vocabulary_id, tuple(request.tokens), special))
        return inference_pb2.PutVocabularyResponse()


def _request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    sampling = message.sampling
    return GenerationRequest(
        request_id=_request_id(message.request_id),
        model_id=check_model_id(message.model_id),
        prompt=tuple(message.prompt_token_ids),
        max_new_tokens=message.max_new_tokens,
        sampling=_sampling(sampling),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_token_ids=frozenset(message.stop_token_ids),
        min_new_tokens=sampling.min_new_tokens,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
        prompt_logprobs=message.prompt_logprobs,
        num_generated=message.num_generated,
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def _grammar(message: inference_pb2.Grammar) -> Grammar:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidGrammar("the grammar is of no known kind")
    return Grammar(GrammarKind(kind), getattr(message, kind), message.vocabulary_id)


def _sampling(message: inference_pb2.SamplingParams) -> Sampling:
    """0 where nothing is set, which for some means all that there is."""
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def _request_id(text: str) -> str:
    try:
        return parse_session(text)
    except InvalidRequest:
        raise InvalidRequest(f"request_id {text[:80]!r} is not a UUID") from None


def _event(event: Emitted) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(
        token_id=event.token_id,
        finish_reason=_FINISH[event.finish_reason],
        cached_tokens=event.cached_tokens,
        logprobs=_logprobs(event.logprobs) if event.logprobs else None,
        prompt_logprobs=[_logprobs(one) for one in event.prompt_logprobs],
    )


def _logprobs(found: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        logprob=found.logprob,
        top_token_ids=[token for token, _ in found.top],
        top_logprobs=[logprob for _, logprob in found.top],
    )
