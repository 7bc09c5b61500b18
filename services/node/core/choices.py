"""What the choice of a token hangs on beside logits, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.logprobs import TokenLogprobs
from meshnet.wire import Buffer


@dataclass(frozen=True, slots=True)
class Counted:
    """What penalties count: the tokens of a text, each once, and how often each was generated. Both int64 `[tokens]`,
    in native order."""

    token_ids: Buffer
    times: Buffer


@dataclass(frozen=True, slots=True)
class Place:
    """What a choice hangs on of the text before it. `counted` is there if there are penalties.

    `barred`: tokens that may not be chosen. `allowed`: those that may, all of them unless it is there: a bit for each
    token, uint32 `[ceil(vocab / 32)]`, little-endian, the lowest bit first.
    """

    counted: Counted | None = None
    barred: tuple[int, ...] = ()
    allowed: Buffer | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing hangs on it."""
        return not (self.counted or self.barred or self.allowed is not None)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a grammar lets follow on a text. `mask` as in Place. `is_end`: nothing but a stop token, which may then come
    however early it is. `is_nothing`: not even that, since the request has none."""

    mask: Buffer
    is_end: bool = False
    is_nothing: bool = False


# Nothing hangs on the text.
ANYWHERE = Place()


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and its logprobs if they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None
