"""`POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator

from quart import Blueprint, Response, g, request

from services.gateway import events
from services.gateway.api_errors import ApiError, error_object
from services.gateway.events import AnswerFormat, ChatFormat, CompletionFormat
from services.gateway.openai_types import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.service import Prepared, Service

log = logging.getLogger(__name__)


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("generation", __name__)

    @routes.post("/v1/completions")
    async def completions() -> Response:
        parsed = CompletionRequest.parse(await _body())
        return await _answer(service, parsed, await service.prepare_completion(parsed), CompletionFormat)

    @routes.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        parsed = ChatRequest.parse(await _body())
        return await _answer(service, parsed, await service.prepare_chat(parsed), ChatFormat)

    return routes


async def _body() -> bytes:
    body: bytes = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    return body


async def _answer(
    service: Service, parsed: GenerationRequest, prepared: Prepared, kind: type[AnswerFormat]
) -> Response:
    generation = prepared.generation
    g.request_id = generation.request_id
    answer = kind(generation.request_id, generation.model_id, int(time.time()), parsed.include_usage)
    if parsed.stream:
        return await _stream(service, prepared, answer)
    async with contextlib.aclosing(service.text(prepared)) as pieces:
        text = "".join([piece async for piece in pieces])
    whole = answer.whole(text, prepared.output.finish_reason or "", _usage(prepared))
    return Response(json.dumps(whole, ensure_ascii=False), content_type="application/json")


async def _stream(service: Service, prepared: Prepared, answer: AnswerFormat) -> Response:
    pieces = service.text(prepared)
    # The answer begins with the first token, so that what fails before it still gets its own status.
    first = await anext(pieces, "")
    response = Response(_events(pieces, first, prepared, answer), content_type="text/event-stream; charset=utf-8")
    response.timeout = None
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response


async def _events(
    pieces: AsyncGenerator[str, None], first: str, prepared: Prepared, answer: AnswerFormat
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(pieces):
        try:
            if (start := answer.start()) is not None:
                yield events.sse(start)
            if first:
                yield events.sse(answer.text(first))
            async for piece in pieces:
                if piece:
                    yield events.sse(answer.text(piece))
            yield events.sse(answer.end(prepared.output.finish_reason or ""))
            if answer.include_usage:
                yield events.sse(answer.last(_usage(prepared)))
            yield events.DONE
        except ApiError as error:
            yield events.sse(error.body)
        except Exception:
            log.exception("generation %s failed", answer.request_id)
            yield events.sse(error_object("Internal error.", 500, code="internal"))


def _usage(prepared: Prepared) -> events.Usage:
    output = prepared.output
    return events.usage(prepared.num_prompt_tokens, output.num_tokens, output.num_cached_tokens)
