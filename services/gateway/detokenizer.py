"""Token ids to text, one token at a time.

::

    ids of the window:   [ context ............ | pending ....... ]
    their text:          [ already emitted ......... | new ... | U+FFFD... held back ]

The window is decoded whole at each step, because a token's text depends on what is before it: bytes of one character
may lie in several tokens, and some tokenizers drop the space of the first word. Once a step ends in whole characters,
its tokens are the context of the next window, so the window stays short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """The texts returned by `push` and one last `flush`, joined, are what `decode` makes of all the tokens.

    `context` are tokens of a text that goes on with the first one pushed; their own text is not returned.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0
        self._num_emitted = 0
        if context:
            self._begin_after(context)

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character lacks bytes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        new = whole[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(whole))
        if new and whole == text:
            self._advance()
        return new

    def flush(self) -> str:
        """What is left at the end, as U+FFFD where bytes never came."""
        new = self._decode(self._window)[self._num_emitted :]
        self._num_emitted += len(new)
        return new

    def _advance(self) -> None:
        self._begin_after(self._window[self._num_context :])

    def _begin_after(self, tokens: Sequence[int]) -> None:
        context = list(tokens)
        text = self._decode(context)
        # A context without text would make the next token the first word, which loses its space.
        if text and not text.endswith(REPLACEMENT):
            self._window = context
            self._num_context = len(context)
            self._num_emitted = len(text)
