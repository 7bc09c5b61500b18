"""How many tokens are worth guessing: from how often guesses were right and from what a longer step costs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.node.core.batching import DECODED_TOKENS
from services.node.core.choices import Choice
from services.node.core.drafts import PromptLookup, accept

# Drafted ones and the one before them: up to so many a CPU's kernels take hardly longer than for one, hops do not take
# them for a part of a prompt, and more are seldom all right.
MAX_ROW_TOKENS = DECODED_TOKENS
# Drafts have one of few lengths, so that rows of equal length can share a frame, and few kernels are compiled.
SIZES = (0, 3, 7, MAX_ROW_TOKENS - 1)
# Tokens of all sessions in a step, unless nobody drafts any: the workspace has room for the logits of so many, and from
# more rows on oneDNN adds up in another order, so that what comes out is not the same to the bit.
MAX_STEP_TOKENS = 32
# Less is noise.
MIN_GAIN = 1.03
# What does not pay is tried again after so many chances, then after twice as many each time up to a limit.
FIRST_PAUSE, LAST_PAUSE = 4, 64
PROBE_TOKENS = SIZES[1]
# Before anything was drafted: two tokens right, one wrong. Of the weight of those before, each draft leaves so much.
PRIOR_RIGHT, PRIOR_WRONG = 2.0, 1.0
KEPT = 0.85
# Steps without drafts come first: what drafts add is added to something.
FEWEST_STEPS = 3
# Steps that a cost is learnt from. None counts as more than so many times slower than was expected: it had to wait.
STEPS_LEARNT = 20
MAX_RATIO = 5.0
# Until steps of several lengths were seen a token more takes this part of a step of one.
PRIOR_TOKEN_SHARE = 1 / 32
# In tokens squared, what lengths must differ by to tell more than that. Next to nothing: while all steps are alike the
# line keeps its slope.
PRIOR_VARIANCE = 1e-9


class StepCost:
    """Seconds that a step of a route takes, by its tokens: a line through the latest steps."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._variance = self._covariance = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there were enough steps to tell from."""
        return self._weight >= FEWEST_STEPS

    def add(self, num_tokens: int, seconds: float, share: float = 1.0) -> None:
        """A step of so many tokens took so long. `share`: of those who tell of the same step, one is one."""
        if self._weight:
            seconds = min(seconds, MAX_RATIO * self.seconds(num_tokens))
        self._weight = min(self._weight + share, STEPS_LEARNT)
        part = share / self._weight
        tokens_off, seconds_off = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += part * tokens_off
        self._seconds += part * seconds_off
        self._variance = (1 - part) * (self._variance + part * tokens_off**2)
        self._covariance = (1 - part) * (self._covariance + part * tokens_off * seconds_off)

    def seconds(self, num_tokens: int) -> float:
        """Of a step of so many tokens. 0 while nothing is known, else more than 0."""
        return self._seconds + self._token_seconds() * (num_tokens - self._tokens)

    def _token_seconds(self) -> float:
        if not self._weight:
            return 0.0
        prior = PRIOR_TOKEN_SHARE * self._seconds / (1 + PRIOR_TOKEN_SHARE * (self._tokens - 1))
        slope = (self._covariance + PRIOR_VARIANCE * prior) / (self._variance + PRIOR_VARIANCE)
        # A step of no tokens takes some time still: below it the line would lead to less than nothing.
        return min(max(slope, 0.0), 0.99 * self._seconds / self._tokens)


class DraftLimit(Protocol):
    """Decides for one session how much to draft."""

    def choose(self, cost: StepCost, num_rows: int) -> int:
        """Tokens to draft now that there is something to draft. `num_rows` sessions share a step."""
        ...

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """What became of a draft."""
        ...


class FixedLimit:
    """As many tokens as one is told, whatever it costs; 0: speculation is off."""

    def __init__(self, num_tokens: int) -> None:
        assert 0 <= num_tokens < MAX_ROW_TOKENS
        self._num_tokens = num_tokens

    def choose(self, cost: StepCost, num_rows: int) -> int:
        return self._num_tokens

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Nothing changes its mind."""


class MeasuredLimit:
    """The length at which most tokens a second are expected: none if that is no more than without."""

    def __init__(self) -> None:
        self._right, self._wrong = PRIOR_RIGHT, PRIOR_WRONG
        self._pause, self._chances = FIRST_PAUSE, 0

    def choose(self, cost: StepCost, num_rows: int) -> int:
        if not cost.is_known:
            return 0
        sizes = [size for size in SIZES if not size or num_rows * (1 + size) <= MAX_STEP_TOKENS]
        best = max(sizes, key=lambda size: self._gain(size, cost, num_rows))
        if best and self._gain(best, cost, num_rows) > MIN_GAIN:
            self._pause, self._chances = FIRST_PAUSE, 0
            return best
        self._chances += 1
        if self._chances <= self._pause or len(sizes) == 1:
            return 0
        self._pause, self._chances = min(2 * self._pause, LAST_PAUSE), 0
        return PROBE_TOKENS

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        self._right = KEPT * self._right + num_accepted
        self._wrong = KEPT * self._wrong + (num_accepted < num_drafted)

    def _gain(self, size: int, cost: StepCost, num_rows: int) -> float:
        """How many times as many tokens a second as without drafts, if all sessions in the step draft so much: what a
        row adds to a step, all of them wait for."""
        share = self._right / (self._right + self._wrong)
        expected = sum(share**count for count in range(size + 1))
        return expected * cost.seconds(num_rows) / cost.seconds(num_rows * (1 + size))


NewLimit = Callable[[], DraftLimit]


def no_drafts() -> DraftLimit:
    return FixedLimit(0)


@dataclass(slots=True)
class DraftCounts:
    """Steps that tokens were drawn behind, tokens that were drafted for them and those of them that were right."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: DraftCounts) -> None:
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted


class Drafts:
    """Those of one session."""

    def __init__(self, prompt: Sequence[int], limit: DraftLimit) -> None:
        self.counts = DraftCounts()
        self._lookup = PromptLookup(prompt)
        self._limit = limit

    def next(self, room: int, cost: StepCost, num_rows: int) -> tuple[int, ...]:
        """What to guess behind the token that was emitted last: at most `room` tokens."""
        place = self._lookup.find() if room > 0 else None
        if place is None:
            return ()
        return self._lookup.draft(place, min(self._limit.choose(cost, num_rows), room))

    def emitted(self, token: int) -> None:
        self._lookup.append(token)

    def settle(self, draft: Sequence[int], drawn: Sequence[Choice | BaseException]) -> Sequence[Choice | BaseException]:
        """What is emitted of what was drawn behind the last token and behind each of a draft."""
        token_ids = [outcome.token_id if isinstance(outcome, Choice) else None for outcome in drawn]
        outcomes = drawn[: len(accept(draft, token_ids))]
        self.counts.add(DraftCounts(1, len(draft), len(outcomes) - 1))
        if draft:
            self._limit.learn(len(draft), len(outcomes) - 1)
        return outcomes
