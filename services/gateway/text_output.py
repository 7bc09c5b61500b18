"""From the tokens of one generation to the text that its client sees."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.gateway.detokenizer import Decode, Detokenizer
from services.gateway.stopping import StopStrings

STOP = "stop"
LENGTH = "length"


class TextOutput:
    """Streamed and unstreamed answers both come from here, so they are the same text.

    `num_tokens` counts every token received, a stop token included, and `num_cached_tokens` those of the prompt that
    were not computed again. `finish_reason` is set at the end.
    """

    def __init__(self, decode: Decode, stop_token_ids: Collection[int] = (), stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self.num_tokens = self.num_cached_tokens = 0
        self.finish_reason: str | None = None

    def push(self, token_id: int) -> str:
        """The text to send now. After it `finish_reason` may be set: no more tokens are wanted."""
        self.num_tokens += 1
        if token_id in self._stop_token_ids:
            return self.finish(STOP)
        text = self._stops.push(self._detokenizer.push(token_id))
        if self._stops.found is not None:
            self.finish_reason = STOP
        return text

    def finish(self, reason: str) -> str:
        """Ends the text; returns what was held back. Once ended, it stays as it is."""
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        text = self._stops.push(self._detokenizer.flush())
        if self._stops.found is not None:
            self.finish_reason = STOP
            return text
        return text + self._stops.flush()
