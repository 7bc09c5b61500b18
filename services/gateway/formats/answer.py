"""What the answers of all endpoints that generate have in common: JSON objects, and server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.choice import ChoiceResult
from services.gateway.text_output import Piece

DONE = b"data: [DONE]\n\n"
# Clients skip it; proxies see that the stream lives.
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `num_cached_tokens`: of the prompts, as the mesh had them in its KV caches."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


def sse(payload: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event. JSON escapes line breaks, so it is always one data line."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class AnswerFormat(ABC):
    """The objects and events of one answer."""

    __slots__ = ()

    @abstractmethod
    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        """The unstreamed answer."""

    @abstractmethod
    def start(self) -> Iterator[bytes]:
        """Events before any text."""

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Events of a piece of a choice."""

    @abstractmethod
    def end(self, usage: Usage) -> Iterator[bytes]:
        """Events after the last piece of the last choice."""

    @abstractmethod
    def failed(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        """Events that end a stream which has begun. `error` is the body that an unstreamed answer would have."""
