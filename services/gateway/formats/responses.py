"""The objects of `/v1/responses`, whole and as typed events.

A response has one output item, a message of one part:

::

    response.created, response.in_progress
      response.output_item.added
        response.content_part.added
          response.output_text.delta ...
          response.output_text.done
        response.content_part.done
      response.output_item.done
    response.completed, or response.incomplete if the text was cut at its most tokens

A stream that breaks off ends with `error`, which has the exact code, and `response.failed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.api.responses import ResponsesRequest
from services.gateway.choice import ChoiceResult, ChoiceResults
from services.gateway.formats.answer import AnswerFormat, Usage, sse
from services.gateway.formats.logprobs import TokenBytes, chat_logprobs
from services.gateway.text_output import LENGTH, Piece, TokenEntry

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
_NOTHING = ChoiceResult("", (), "")


class ResponsesFormat(AnswerFormat):
    """One response. `created` is in seconds since 1970."""

    __slots__ = ("_created", "_num_events", "_request", "_request_id", "_results", "_token_bytes")

    def __init__(self, request: ResponsesRequest, request_id: str, created: int, token_bytes: TokenBytes) -> None:
        self._request = request
        self._request_id = request_id
        self._created = created
        self._token_bytes = token_bytes
        self._num_events = 0
        self._results = ChoiceResults(1)

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        (result,) = results
        status = _status(result)
        return self._response(status, [self._item(status, result)], usage)

    def start(self) -> Iterator[bytes]:
        in_progress = self._response(IN_PROGRESS, [])
        yield self._event("response.created", response=in_progress)
        yield self._event("response.in_progress", response=in_progress)
        item = {**self._item(IN_PROGRESS, _NOTHING), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part_event("response.content_part.added", part=self._part(_NOTHING))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        self._results.add(index, piece)
        logprobs = self._logprobs(piece.tokens)
        if piece.text or logprobs:
            yield self._part_event("response.output_text.delta", delta=piece.text, logprobs=logprobs)

    def end(self, usage: Usage) -> Iterator[bytes]:
        (result,) = self._results.whole()
        status = _status(result)
        logprobs = self._logprobs(result.tokens)
        yield self._part_event("response.output_text.done", text=result.text, logprobs=logprobs)
        yield self._part_event("response.content_part.done", part=self._part(result))
        yield self._event("response.output_item.done", output_index=0, item=self._item(status, result))
        yield self._event(f"response.{status}", response=self.whole([result], usage))

    def failed(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        fault = error["error"]
        yield self._event("error", code=fault["code"], message=fault["message"], param=fault["param"])
        code = "rate_limit_exceeded" if fault["type"] == "rate_limit_error" else "server_error"
        (result,) = self._results.whole()
        response = self._response(FAILED, [self._item(INCOMPLETE, result)])
        failed = {**response, "error": {"code": code, "message": fault["message"]}}
        yield self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    @property
    def _item_id(self) -> str:
        return f"msg_{self._request_id}"

    def _part(self, result: ChoiceResult) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": result.text,
            "annotations": [],
            "logprobs": self._logprobs(result.tokens),
        }

    def _item(self, status: str, result: ChoiceResult) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._part(result)],
        }

    def _logprobs(self, tokens: Sequence[TokenEntry]) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = chat_logprobs(tokens, self._token_bytes)["content"]
        return shown

    def _response(self, status: str, output: Sequence[Mapping[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        request = self._request
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": request.model,
            "output": list(output),
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": _text_format(request)},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": request.top_logprobs,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _text_format(request: ResponsesRequest) -> dict[str, Any]:
    asked = request.text.format
    return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_none=True)


def _status(result: ChoiceResult) -> str:
    return INCOMPLETE if result.finish_reason == LENGTH else COMPLETED


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
