"""Guesses at the tokens that come next, and which of them were right. Pure; randomness is an argument.

Text repeats itself: code that is edited, a record that is rewritten, a name. So the guess is what followed when the
last tokens stood there before (prompt lookup). It costs no model, and a wrong one changes nothing but time.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

_Outcome = TypeVar("_Outcome")

# A guess needs so many tokens that stood there before. Two are rare enough by chance, and begin many names.
MIN_MATCH = 2
# Of places that agree in more than this, the latest is as good as any.
MAX_MATCH = 8
# Places that are compared for one guess: bounds its time in texts where a pair of tokens is everywhere.
MAX_PLACES = 64
# Of a longer prompt only the end is searched: bounds memory and the time that its index takes before the first token.
MAX_INDEXED = 32768


class PromptLookup:
    """The tokens of a session, indexed by pairs: for each place the one before that follows on the same pair."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = array("q", tokens[-MAX_INDEXED:])
        self._latest: dict[tuple[int, int], int] = {}
        # Places count from 1 here, and what follows on no pair, or on a new one, has 0.
        self._before = array("q", [0] * min(MIN_MATCH, len(self._tokens)))
        for place, pair in enumerate(pairwise(self._tokens[:-1]), MIN_MATCH):
            self._enter(pair, place)

    def append(self, token: int) -> None:
        if len(self._tokens) >= MIN_MATCH:
            self._enter((self._tokens[-2], self._tokens[-1]), len(self._tokens))
        else:
            self._before.append(0)
        self._tokens.append(token)

    def find(self) -> int | None:
        """The index of the token that followed on the longest earlier match with the end, of at least MIN_MATCH tokens.

        Matches longer than MAX_MATCH count as equal; the latest of equals wins, of the last MAX_PLACES.
        """
        if len(self._tokens) < MIN_MATCH:
            return None
        found, longest = None, 0
        place = self._latest.get((self._tokens[-2], self._tokens[-1]), 0)
        for _ in range(MAX_PLACES):
            if not place or longest == MAX_MATCH:
                break
            length = self._match(place)
            if length > longest:
                found, longest = place, length
            place = self._before[place]
        return found

    def draft(self, place: int, num_tokens: int) -> tuple[int, ...]:
        """So many tokens from a place that was found. Where the text ends, the draft goes on in itself: in a loop."""
        period = len(self._tokens) - place
        return tuple(self._tokens[place + index % period] for index in range(num_tokens))

    def _enter(self, pair: tuple[int, int], place: int) -> None:
        self._before.append(self._latest.get(pair, 0))
        self._latest[pair] = place

    def _match(self, place: int) -> int:
        """How many tokens before the place are those at the end."""
        tokens, end = self._tokens, len(self._tokens)
        length = MIN_MATCH
        while length < min(MAX_MATCH, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class Uniforms:
    """The draws of a session, one for each token that it emits, whatever is guessed beyond."""

    def __init__(self, source: random.Random, num_used: int = 0) -> None:
        """So many of the source's were used by a call that broke off."""
        for _ in range(num_used):
            source.random()
        self._source = source
        self._ahead: deque[float] = deque()

    def next(self, count: int) -> list[float]:
        """Those of the next tokens. They stay the next ones until tokens are emitted."""
        while len(self._ahead) < count:
            self._ahead.append(self._source.random())
        return [self._ahead[index] for index in range(count)]

    def emitted(self) -> None:
        """One token has used its own."""
        self._ahead.popleft()


def accept(draft: Sequence[int], drawn: Sequence[_Outcome]) -> Sequence[_Outcome]:
    """What is emitted of the outcomes that were drawn behind the last token and behind each of a draft.

    An outcome counts as long as the draft before it is what was drawn: then it was drawn behind the very tokens that
    would have been there without a draft. So there is one more than the drafted tokens that were right.
    """
    count = 1
    while count < len(drawn) and drawn[count - 1] == draft[count - 1]:
        count += 1
    return drawn[:count]
