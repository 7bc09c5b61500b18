"""The objects of `/v1/completions` and `/v1/chat/completions`, whole and in chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.choice import ChoiceResult
from services.gateway.formats.answer import DONE, AnswerFormat, Usage, sse
from services.gateway.text_output import Piece, TokenEntry
from services.gateway.tools.calls import Call

Logprobs = Callable[[Sequence[TokenEntry]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ChoicesFormat(AnswerFormat):
    """Answers that are a list of choices.

    `created` is in seconds since 1970. `logprobs` shows tokens with theirs; None if they were not asked for.
    `has_tools`: the answer may be calls, and no content.
    """

    request_id: str
    model_id: str
    created: int
    num_choices: int = 1
    include_usage: bool = False
    logprobs: Logprobs | None = None
    has_tools: bool = False

    def end(self, usage: Usage) -> Iterator[bytes]:
        if self.include_usage:
            yield sse({**self._chunk([]), "usage": usage.as_json()})
        yield DONE

    def failed(self, error: Mapping[str, Any]) -> Iterator[bytes]:
        yield sse(error)

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError

    def _object(self, prefix: str, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model_id,
            "choices": list(choices),
        }

    def _choice(
        self, index: int, content: Mapping[str, Any], finish_reason: str | None, tokens: Sequence[TokenEntry] | None
    ) -> dict[str, Any]:
        """`tokens` are those to show with the content, or None where there is none yet or no more."""
        shown = None if self.logprobs is None or tokens is None else self.logprobs(tokens)
        return {"index": index, **content, "finish_reason": finish_reason, "logprobs": shown}

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        chunk = self._chunk([choice])
        # The API puts a null usage in every other chunk of a stream that ends with one.
        return sse({**chunk, "usage": None} if self.include_usage else chunk)


@dataclass(frozen=True, slots=True)
class CompletionFormat(ChoicesFormat):
    """Objects of `/v1/completions`."""

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        choices = [
            self._choice(index, {"text": result.text}, result.finish_reason, result.tokens)
            for index, result in enumerate(results)
        ]
        return {**self._chunk(choices), "usage": usage.as_json()}

    def start(self) -> Iterator[bytes]:
        return iter(())

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        if piece.text or piece.tokens:
            yield self._event(self._choice(index, {"text": piece.text}, None, piece.tokens))
        if piece.finish_reason is not None:
            yield self._event(self._choice(index, {"text": ""}, piece.finish_reason, None))

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._object("cmpl", "text_completion", choices)


@dataclass(frozen=True, slots=True)
class ChatFormat(ChoicesFormat):
    """Objects of `/v1/chat/completions`."""

    def whole(self, results: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        choices = [
            self._choice(index, {"message": self._message(index, result)}, result.finish_reason, result.tokens)
            for index, result in enumerate(results)
        ]
        return {**self._object("chatcmpl", "chat.completion", choices), "usage": usage.as_json()}

    def start(self) -> Iterator[bytes]:
        for index in range(self.num_choices):
            yield self._event(
                self._choice(
                    index, {"delta": {"role": "assistant", "content": None if self.has_tools else ""}}, None, None
                )
            )

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        if piece.text or any(not token.is_stop for token in piece.tokens):
            yield self._event(self._choice(index, {"delta": {"content": piece.text}}, None, piece.tokens))
        for call in piece.calls:
            whole = self._call(index, call)
            named = {**whole, "function": {"name": call.name, "arguments": ""}}
            for part in (named, {"function": {"arguments": call.arguments}}):
                delta = {"tool_calls": [{"index": call.index, **part}]}
                yield self._event(self._choice(index, {"delta": delta}, None, None))
        if piece.finish_reason is not None:
            yield self._event(self._choice(index, {"delta": {}}, piece.finish_reason, None))

    def _message(self, index: int, result: ChoiceResult) -> dict[str, Any]:
        content = result.text or (None if self.has_tools else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if result.calls:
            message["tool_calls"] = [self._call(index, call) for call in result.calls]
        return message

    def _call(self, index: int, call: Call) -> dict[str, Any]:
        digest = hashlib.sha256(f"{self.request_id} {index} {call.index}".encode()).hexdigest()
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{digest[:24]}", "type": "function", "function": function}

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._object("chatcmpl", "chat.completion.chunk", choices)
