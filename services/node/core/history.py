"""What the choices of a session hang on beside logits: its draws, and the text so far. Pure; randomness is an argument.

Drafts are a text that may come to be: what is asked for behind each of them is what it would be if they had.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

from services.node.core.choices import ANYWHERE, Allowed, Counted, Place
from services.node.core.drafts import Uniforms
from services.node.core.request import GenerationRequest


class TokenCounts:
    """The tokens of a text, each once, and how often each was generated."""

    def __init__(self, read: Iterable[int] = (), generated: Iterable[int] = ()) -> None:
        """`read` are tokens of the text that were not generated."""
        self._places = {token: place for place, token in enumerate(dict.fromkeys(read))}
        self._token_ids = array("q", self._places)
        self._times = array("q", bytes(self._token_ids.itemsize * len(self._token_ids)))
        for token in generated:
            self.add(token)

    def add(self, token: int) -> None:
        """It was generated, once more."""
        place = self._places.setdefault(token, len(self._token_ids))
        if place == len(self._token_ids):
            self._token_ids.append(token)
            self._times.append(0)
        self._times[place] += 1

    def counted(self) -> Counted:
        return Counted(self._token_ids.tobytes(), self._times.tobytes())

    def behind(self, draft: Sequence[int]) -> list[Counted]:
        """Of the text as it is, and with one more token of the draft each time."""
        num_known = len(self._token_ids)
        found = [self.counted()]
        for token in draft:
            self.add(token)
            found.append(self.counted())
        for token in draft:
            self._times[self._places[token]] -= 1
        while len(self._token_ids) > num_known:
            self._times.pop()
            del self._places[self._token_ids.pop()]
        return found


class History:
    """Of one session. What a call that broke off had generated counts as if it had been generated here."""

    def __init__(self, request: GenerationRequest, source: random.Random) -> None:
        self._num_generated = request.num_generated
        self._min_tokens = request.min_new_tokens
        self._stop_tokens = tuple(sorted(request.stop_token_ids))
        self._uniforms = Uniforms(source, request.num_generated)
        self._counts = _counts(request) if request.sampling.has_penalties else None

    def uniforms(self, count: int) -> list[float]:
        """The draws of the next tokens."""
        return self._uniforms.next(count)

    def places(self, draft: Sequence[int], allowed: Sequence[Allowed] | None = None) -> list[Place]:
        """Behind the text as it is, and behind each token of a draft. `allowed`: what a grammar lets follow there."""
        num_places = len(draft) + 1
        counted: Sequence[Counted | None] = self._counts.behind(draft) if self._counts else [None] * num_places
        by_grammar: Sequence[Allowed | None] = allowed or [None] * num_places
        return [self._place(index, *ones) for index, ones in enumerate(zip(counted, by_grammar, strict=True))]

    def emitted(self, token: int) -> None:
        self._num_generated += 1
        self._uniforms.emitted()
        if self._counts:
            self._counts.add(token)

    def _place(self, num_drafted: int, counted: Counted | None, allowed: Allowed | None) -> Place:
        is_early = self._num_generated + num_drafted < self._min_tokens and not (allowed and allowed.is_end)
        if not (counted or is_early or allowed):
            return ANYWHERE
        return Place(counted, self._stop_tokens if is_early else (), allowed.mask if allowed else None)


def _counts(request: GenerationRequest) -> TokenCounts:
    begin = len(request.prompt) - request.num_generated
    # The other penalties look only at what was generated.
    read = request.prompt[:begin] if request.sampling.repetition_penalty != 1.0 else ()
    return TokenCounts(read, request.prompt[begin:])
