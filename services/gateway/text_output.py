"""From the tokens of one generation to the text that its client sees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from meshnet.logprobs import TokenLogprobs
from services.gateway.detokenizer import Decode, Detokenizer
from services.gateway.stopping import StopStrings
from services.gateway.tools.calls import Call

STOP = "stop"
LENGTH = "length"
TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token and its logprobs. `offset` is how many characters of the choice's text stand before it.

    `logprobs` are None for the first token of a prompt, which nothing predicts. A stop token has no text.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes next of a choice: text, the tokens that begin in it, calls of tools, and in the last piece why it
    ended."""

    text: str = ""
    tokens: tuple[TokenEntry, ...] = ()
    finish_reason: str | None = None
    calls: tuple[Call, ...] = ()


class TextOutput:
    """Streamed and unstreamed answers both come from here, so they are the same text and the same logprobs.

    `num_tokens` counts every token received, a stop token included. `finish_reason` is set at the end. Stop strings
    count only behind the first `min_tokens`. `context` is the end of the prompt, if the text goes on with it, and
    `offset` the length of what the client is shown before.
    """

    def __init__(
        self,
        decode: Decode,
        stop_token_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        context: Sequence[int] = (),
        offset: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(decode, context)
        self._stops = StopStrings(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._waiting: list[TokenEntry] = []
        self._num_decoded = self._num_shown = offset
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> Piece:
        """What to send now. After it `finish_reason` may be set: no more tokens are wanted."""
        self.num_tokens += 1
        is_stop = token_id in self._stop_token_ids
        if logprobs is not None:
            self._waiting.append(TokenEntry(token_id, self._num_decoded, logprobs, is_stop))
        if is_stop:
            return self.finish(STOP)
        return self._shown(self._passed(self._detokenizer.push(token_id)))

    def finish(self, reason: str) -> Piece:
        """Ends the text; returns what was held back. Once ended, it stays as it is."""
        if self.finish_reason is not None:
            return Piece()
        text = self._passed(self._detokenizer.flush())
        if self._stops.found is None:
            self.finish_reason = reason
            text += self._stops.flush()
        return self._shown(text)

    def _passed(self, text: str) -> str:
        self._num_decoded += len(text)
        if self.num_tokens <= self._min_tokens:
            return text
        passed = self._stops.push(text)
        if self._stops.found is not None:
            self.finish_reason = STOP
        return passed

    def _shown(self, text: str) -> Piece:
        self._num_shown += len(text)
        return Piece(text, self._released(), self.finish_reason)

    def _released(self) -> tuple[TokenEntry, ...]:
        """Tokens whose text begins in what is shown by now; at the end all, unless a stop string cut them off."""
        ends_whole = self.finish_reason is not None and self._stops.found is None
        count = len(self._waiting)
        if not ends_whole:
            count = next((i for i, entry in enumerate(self._waiting) if entry.offset >= self._num_shown), count)
        released, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        return released
