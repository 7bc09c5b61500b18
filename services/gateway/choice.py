"""One choice of an answer: what is asked of the mesh for it, and what its client is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshnet.logprobs import TokenLogprobs
from services.gateway.generation import FinishReason, Generation, TokenEvent
from services.gateway.text_output import LENGTH, STOP, TOOL_CALLS, Piece, TextOutput, TokenEntry
from services.gateway.tools.calls import Call
from services.gateway.tools.parser import CallParser


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as it is shown before the text. `offsets`: where each of its tokens begins, in characters."""

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]

    def piece(self, logprobs: tuple[TokenLogprobs, ...] | None) -> Piece:
        """`logprobs` of all tokens but the first, or None if they are not shown."""
        if logprobs is None:
            return Piece(self.text)
        of_tokens = zip(self.token_ids, self.offsets, (None, *logprobs), strict=False)
        return Piece(self.text, tuple(TokenEntry(*of_token) for of_token in of_tokens))


class CallOutput:
    """Takes calls of tools out of a text. Unless there may be several, the first ends it."""

    def __init__(self, parser: CallParser, *, is_parallel: bool) -> None:
        self._parser = parser
        self._is_parallel = is_parallel

    def passed(self, piece: Piece) -> Piece:
        """What is left of a piece, and the calls that it completes."""
        found = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            found += self._parser.finish()
        calls = [one for one in found if isinstance(one, Call)]
        reason = piece.finish_reason
        if calls and not self._is_parallel:
            found, calls, reason = found[: found.index(calls[0])], calls[:1], STOP
        if reason == STOP and self._parser.num_calls:
            reason = TOOL_CALLS
        text = "".join(one for one in found if isinstance(one, str))
        return Piece(text, piece.tokens, reason, tuple(calls))


@dataclass(slots=True)
class Choice:
    """`index` is its place among the choices of the answer, `prompt_index` that of its prompt among the prompts."""

    index: int
    prompt_index: int
    generation: Generation
    output: TextOutput
    echo: Echo | None = None
    calls: CallOutput | None = None
    num_cached_tokens: int = 0
    has_begun: bool = field(default=False, init=False)

    def received(self, event: TokenEvent) -> Iterator[Piece]:
        """What to show of an event of the mesh. The last piece carries the finish reason."""
        if not self.has_begun:
            self.has_begun = True
            self.num_cached_tokens = event.cached_tokens
            if self.echo is not None:
                yield self.echo.piece(event.prompt_logprobs if self.generation.prompt_logprobs else None)
        if event.token_id is not None:
            yield self._shown(self.output.push(event.token_id, event.logprobs))
        if event.finish_reason is not None and self.output.finish_reason is None:
            yield self._shown(self.output.finish(STOP if event.finish_reason is FinishReason.STOP else LENGTH))

    def _shown(self, piece: Piece) -> Piece:
        if self.calls is None:
            return piece
        piece = self.calls.passed(piece)
        if piece.finish_reason is not None and self.output.finish_reason is None:
            # No more is wanted, and what comes behind the call is nobody's.
            self.output.finish(STOP)
        return piece

    def without_mesh(self) -> Iterator[Piece]:
        """All there is to show of a choice of no new tokens and no logprobs."""
        if self.echo is not None:
            yield self.echo.piece(None)
        yield self.output.finish(LENGTH)

    @property
    def needs_mesh(self) -> bool:
        return self.generation.max_new_tokens > 0 or self.generation.prompt_logprobs


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A whole choice."""

    text: str
    tokens: tuple[TokenEntry, ...]
    finish_reason: str
    calls: tuple[Call, ...] = ()


class ChoiceResults:
    """Collects pieces to whole choices."""

    def __init__(self, num_choices: int) -> None:
        self._pieces: list[list[Piece]] = [[] for _ in range(num_choices)]

    def add(self, index: int, piece: Piece) -> None:
        self._pieces[index].append(piece)

    def whole(self) -> list[ChoiceResult]:
        return [_joined(pieces) for pieces in self._pieces]


def _joined(pieces: list[Piece]) -> ChoiceResult:
    reasons = [piece.finish_reason for piece in pieces if piece.finish_reason is not None]
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    calls = tuple(call for piece in pieces for call in piece.calls)
    return ChoiceResult(text, tokens, reasons[-1] if reasons else "", calls)
