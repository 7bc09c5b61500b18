"""`POST /v1/completions`, `/v1/chat/completions` and `/v1/responses`."""

from __future__ import annotations

import time

from quart import Blueprint, Response

from services.gateway.api.chat import ChatRequest, template_messages
from services.gateway.api.completions import CompletionRequest
from services.gateway.api.responses import ResponsesRequest
from services.gateway.api.sampling import ChoicesRequest
from services.gateway.bodies import json_body
from services.gateway.formats.choices import ChatFormat, ChoicesFormat, CompletionFormat
from services.gateway.formats.logprobs import chat_logprobs, completion_logprobs
from services.gateway.formats.responses import ResponsesFormat
from services.gateway.service import Prepared, Service
from services.gateway.streaming import answered


def blueprint(service: Service, stream_silence: float) -> Blueprint:
    """`stream_silence`: seconds of silence after which a stream gets a comment."""
    routes = Blueprint("generation", __name__)

    @routes.post("/v1/completions")
    async def completions() -> Response:
        request = CompletionRequest.parse(await json_body())
        return await answer(request, await service.prepare_completion(request), CompletionFormat)

    @routes.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        request = ChatRequest.parse(await json_body())
        tools = request.tools_asked()
        prepared = await service.prepare_chat(request, template_messages(request.messages), tools=tools)
        return await answer(request, prepared, ChatFormat, has_tools=tools is not None)

    @routes.post("/v1/responses")
    async def responses() -> Response:
        request = ResponsesRequest.parse(await json_body())
        prepared = await service.prepare_chat(request, request.messages, "input")
        token_bytes = prepared.target.tokenizer.token_bytes
        shown = ResponsesFormat(request, prepared.request_id, int(time.time()), token_bytes)
        return await answered(service, prepared, shown, stream_silence if request.stream else None)

    async def answer(
        request: ChoicesRequest, prepared: Prepared, kind: type[ChoicesFormat], *, has_tools: bool = False
    ) -> Response:
        shape = chat_logprobs if kind is ChatFormat else completion_logprobs
        token_bytes = prepared.target.tokenizer.token_bytes
        shown = kind(
            prepared.request_id,
            request.model,
            int(time.time()),
            len(prepared.choices),
            request.include_usage,
            None if request.top_logprobs_asked is None else lambda tokens: shape(tokens, token_bytes),
            has_tools,
        )
        return await answered(service, prepared, shown, stream_silence if request.stream else None)

    return routes
