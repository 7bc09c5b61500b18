"""How fast this node passes tokens through one layer of a model: measured once, then followed. Pure.

A *decode* speed is that of a lone token: steps of several sessions take longer, and do more, so they tell nothing of it
and are left out. A *prefill* speed is that of chunks of prompts, however many share a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshnet.chunks import CHUNK_TOKENS
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Speed
from services.node.core.work import ForwardWork, PromptWork, Work

# What is measured. Long prompts may go in larger chunks.
PREFILL_TOKENS = CHUNK_TOKENS
# A step of fewer tokens, or of fewer a session, is neither a chunk nor a lone token.
MIN_PREFILL_TOKENS = 64
# Each step moves a mean by this share of the difference...
STEP_WEIGHT = 0.05
# ... and counts as at most this many times slower or faster: the first step after a load, a step that had to wait.
MAX_RATIO = 3.0
# What has changed by less is no news.
NEWS_RATIO = 1.2
SIGNIFICANT_DIGITS = 3


class Pass(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of one kind. `seconds_per_token` is through one layer."""

    model_id: str
    layers: LayerRange
    kind: Pass
    seconds_per_token: float


def time_step(works: Sequence[Work], seconds: float) -> TimedStep | None:
    """What works that ran as one step tell of the speed of their layers; None: nothing."""
    first = works[0]
    if not isinstance(first, (ForwardWork, PromptWork)) or seconds <= 0:
        return None
    num_segments = sum(len(work.segments) for work in works if isinstance(work, (ForwardWork, PromptWork)))
    num_tokens = sum(work.num_tokens for work in works)
    if num_tokens == 1:
        kind = Pass.DECODE
    elif num_tokens >= MIN_PREFILL_TOKENS * num_segments:
        kind = Pass.PREFILL
    else:
        return None
    return TimedStep(first.model_id, first.layers, kind, seconds / num_tokens / len(first.layers))


@dataclass(slots=True)
class _Mean:
    """An exponentially weighted mean of seconds a token; a plain one while it has few values."""

    seconds: float
    num_values: int

    def add(self, seconds: float) -> None:
        self.num_values += 1
        seconds = min(max(seconds, self.seconds / MAX_RATIO), self.seconds * MAX_RATIO)
        self.seconds += (seconds - self.seconds) * max(STEP_WEIGHT, 1 / self.num_values)


class SpeedTable:
    """Speeds by model and quantization. One is known when both of its passes are."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, Quantization, Pass], _Mean] = {}
        self._told: dict[tuple[str, Quantization], Speed] = {}

    def set_measured(self, speed: Speed) -> None:
        """Begins with a measurement, which counts as many steps."""
        trusted = round(1 / STEP_WEIGHT)
        key = speed.model_id, speed.quantization
        self._means[*key, Pass.PREFILL] = _Mean(1 / speed.prefill_tokens_per_second, trusted)
        self._means[*key, Pass.DECODE] = _Mean(1 / speed.decode_tokens_per_second, trusted)

    def add(self, step: TimedStep, quantization: Quantization) -> None:
        """A step has run through layers that are all stored at this quantization."""
        mean = self._means.setdefault((step.model_id, quantization, step.kind), _Mean(step.seconds_per_token, 0))
        mean.add(step.seconds_per_token)

    def speeds(self) -> tuple[Speed, ...]:
        """What is known, to three digits, by model and quantization."""
        known = sorted({(model_id, quantization) for model_id, quantization, _ in self._means})
        return tuple(speed for key in known if (speed := self._speed(*key)))

    def take_news(self) -> bool:
        """Whether a speed is new or has moved by a fifth since this last said so."""
        speeds = {(speed.model_id, speed.quantization): speed for speed in self.speeds()}
        news = any(key not in self._told or _differ(self._told[key], speed) for key, speed in speeds.items())
        if news:
            self._told = speeds
        return news

    def _speed(self, model_id: str, quantization: Quantization) -> Speed | None:
        prefill = self._means.get((model_id, quantization, Pass.PREFILL))
        decode = self._means.get((model_id, quantization, Pass.DECODE))
        if not prefill or not decode:
            return None
        return Speed(model_id, quantization, _rounded(1 / prefill.seconds), _rounded(1 / decode.seconds))


def _differ(old: Speed, new: Speed) -> bool:
    ratios = (
        new.prefill_tokens_per_second / old.prefill_tokens_per_second,
        new.decode_tokens_per_second / old.decode_tokens_per_second,
    )
    return any(not 1 / NEWS_RATIO <= ratio <= NEWS_RATIO for ratio in ratios)


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
