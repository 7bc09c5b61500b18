"""The gRPC face of an entry node. It only translates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from meshnet.errors import InvalidRequest
from meshnet.model import check_model_id
from meshnet.rpc import translates_errors, translates_stream_errors
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from meshnet.wire import parse_session
from services.node.core.work import Sampling
from services.node.entry import EntryPoint
from services.node.generation import Emitted, FinishReason, GenerationRequest

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


def _request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    sampling = message.sampling
    return GenerationRequest(
        request_id=_request_id(message.request_id),
        model_id=check_model_id(message.model_id),
        prompt=tuple(message.prompt_token_ids),
        max_new_tokens=message.max_new_tokens,
        sampling=Sampling(sampling.temperature, sampling.top_k, sampling.top_p or 1.0),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_token_ids=frozenset(message.stop_token_ids),
    )


def _request_id(text: str) -> str:
    try:
        return parse_session(text)
    except InvalidRequest:
        raise InvalidRequest(f"request_id {text[:80]!r} is not a UUID") from None


def _event(event: Emitted) -> inference_pb2.GenerateEvent:
    return inference_pb2.GenerateEvent(
        token_id=event.token_id, finish_reason=_FINISH[event.finish_reason], cached_tokens=event.cached_tokens
    )
