"""Tokens drawn from what a route has made of a session's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.node.core.choices import Choice, Place
from services.node.core.work import Buffer, SampleWork, Sampling, rows_of
from services.node.runner import Runner


@dataclass(frozen=True, slots=True)
class Draws:
    """How to draw behind each of a few tokens: in one way, each at its place and with a draw of `[0, 1)` that is its
    own. `top_logprobs` as in SampleWork."""

    sampling: Sampling
    uniforms: Sequence[float]
    places: Sequence[Place]
    top_logprobs: int | None = None

    def works(self, model_id: str, hidden: Buffer) -> list[SampleWork]:
        """Of bfloat16 `[uniforms, hidden]`."""
        rows = rows_of(hidden, len(self.uniforms))
        return [
            SampleWork(model_id, row, self.sampling, uniform, place, self.top_logprobs)
            for row, uniform, place in zip(rows, self.uniforms, self.places, strict=True)
        ]


async def draw(runner: Runner, works: Sequence[SampleWork]) -> list[Choice | BaseException]:
    """The choices, or why there is none."""
    outcomes: list[Choice | BaseException] = await asyncio.gather(*runner.submit_all(works), return_exceptions=True)
    return outcomes
