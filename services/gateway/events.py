"""The JSON objects of answers, whole and in chunks, and their encoding as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"

Usage = Mapping[str, Any]


def sse(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event. JSON escapes line breaks, so it is always one data line."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int = 0) -> Usage:
    """`num_cached_tokens`: of the prompt, as the mesh had them in its KV caches."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What all objects of one answer share. `created` is in seconds since 1970."""

    request_id: str
    model_id: str
    created: int
    include_usage: bool = False

    def start(self) -> dict[str, Any] | None:
        """The chunk before any text, if the format has one."""
        raise NotImplementedError

    def text(self, text: str) -> dict[str, Any]:
        """A chunk of text."""
        raise NotImplementedError

    def end(self, finish_reason: str) -> dict[str, Any]:
        """The chunk that says why it ended."""
        raise NotImplementedError

    def whole(self, text: str, finish_reason: str, counts: Usage) -> dict[str, Any]:
        """The unstreamed answer."""
        raise NotImplementedError

    def last(self, counts: Usage) -> dict[str, Any]:
        """The chunk after the end that carries the usage, and nothing else."""
        return {**self.end(""), "choices": [], "usage": dict(counts)}

    def _object(self, prefix: str, kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model_id,
            "choices": [{"index": 0, **choice, "logprobs": None}],
        }

    def _chunk(self, prefix: str, kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
        chunk = self._object(prefix, kind, choice)
        # The API puts a null usage in every other chunk of a stream that ends with one.
        return {**chunk, "usage": None} if self.include_usage else chunk


@dataclass(frozen=True, slots=True)
class CompletionFormat(AnswerFormat):
    """Objects of `/v1/completions`."""

    def start(self) -> dict[str, Any] | None:
        return None

    def text(self, text: str) -> dict[str, Any]:
        return self._chunk("cmpl", "text_completion", {"text": text, "finish_reason": None})

    def end(self, finish_reason: str) -> dict[str, Any]:
        return self._chunk("cmpl", "text_completion", {"text": "", "finish_reason": finish_reason})

    def whole(self, text: str, finish_reason: str, counts: Usage) -> dict[str, Any]:
        answer = self._object("cmpl", "text_completion", {"text": text, "finish_reason": finish_reason})
        return {**answer, "usage": dict(counts)}


@dataclass(frozen=True, slots=True)
class ChatFormat(AnswerFormat):
    """Objects of `/v1/chat/completions`."""

    def start(self) -> dict[str, Any] | None:
        return self._delta({"role": "assistant", "content": ""}, None)

    def text(self, text: str) -> dict[str, Any]:
        return self._delta({"content": text}, None)

    def end(self, finish_reason: str) -> dict[str, Any]:
        return self._delta({}, finish_reason)

    def whole(self, text: str, finish_reason: str, counts: Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        answer = self._object("chatcmpl", "chat.completion", {"message": message, "finish_reason": finish_reason})
        return {**answer, "usage": dict(counts)}

    def _delta(self, delta: Mapping[str, str], finish_reason: str | None) -> dict[str, Any]:
        choice = {"delta": dict(delta), "finish_reason": finish_reason}
        return self._chunk("chatcmpl", "chat.completion.chunk", choice)
