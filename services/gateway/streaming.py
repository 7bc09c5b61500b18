"""Answers over HTTP: whole as JSON, or as a stream of server-sent events."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator

from quart import Response, g

from services.gateway.api_errors import ApiError, error_object
from services.gateway.choice import ChoiceResults
from services.gateway.formats.answer import KEEP_ALIVE, AnswerFormat
from services.gateway.service import ChoicePiece, Prepared, Service

log = logging.getLogger(__name__)

# Logprobs of so many tokens take milliseconds to write.
_MANY_TOKENS = 200

Pieces = AsyncGenerator[ChoicePiece | None, None]


async def answered(service: Service, prepared: Prepared, answer: AnswerFormat, keep_alive: float | None) -> Response:
    """Streams if `keep_alive` is given: the seconds of silence after which a comment is sent. Raises ApiError."""
    g.request_id = prepared.request_id
    if keep_alive is not None:
        return await _stream(service, prepared, answer, keep_alive)
    results = ChoiceResults(len(prepared.choices))
    async with contextlib.aclosing(service.pieces(prepared)) as pieces:
        async for item in pieces:
            if item is not None:
                results.add(item.index, item.piece)
    whole = results.whole()
    num_shown = sum(len(result.tokens) for result in whole)

    def body() -> str:
        return json.dumps(answer.whole(whole, prepared.usage), ensure_ascii=False)

    # Logprobs of long prompts are millions of characters: the event loop is not held up for them.
    text = await service.tokenizers.run(body) if num_shown > _MANY_TOKENS else body()
    return Response(text, content_type="application/json")


async def _stream(service: Service, prepared: Prepared, answer: AnswerFormat, keep_alive: float) -> Response:
    pieces = service.pieces(prepared, keep_alive)
    # The answer begins with the first token, so that what fails before it still gets its own status; or with the first
    # comment, so that nobody on the way cuts a connection on which nothing comes.
    first = await anext(pieces, None)
    response = Response(_events(pieces, first, prepared, answer), content_type="text/event-stream; charset=utf-8")
    response.timeout = None
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response


async def _events(
    pieces: Pieces, first: ChoicePiece | None, prepared: Prepared, answer: AnswerFormat
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(pieces):
        try:
            for event in answer.start():
                yield event
            async for item in _chained(first, pieces):
                if item is None:
                    yield KEEP_ALIVE
                    continue
                for event in answer.piece(item.index, item.piece):
                    yield event
            for event in answer.end(prepared.usage):
                yield event
        except ApiError as error:
            for event in answer.failed(error.body):
                yield event
        except Exception:
            log.exception("generation %s failed", prepared.request_id)
            for event in answer.failed(error_object("Internal error.", 500, code="internal")):
                yield event


async def _chained(first: ChoicePiece | None, rest: Pieces) -> Pieces:
    yield first
    async for item in rest:
        yield item
