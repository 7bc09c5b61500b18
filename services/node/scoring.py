"""Logprobs of a prompt's tokens, from what a route has made of each of them."""

from __future__ import annotations

from meshnet.logprobs import TokenLogprobs
from services.node.core.work import SCORED_TOKENS, Buffer, ScoreWork, rows_of
from services.node.runner import Runner


class PromptScores:
    """Of one prompt. `top_logprobs` as in ScoreWork. Chunks may come in any order."""

    def __init__(self, model_id: str, prompt: tuple[int, ...], top_logprobs: int, runner: Runner) -> None:
        self._model_id = model_id
        self._prompt = prompt
        self._top_logprobs = top_logprobs
        self._runner = runner
        self._pieces: dict[int, tuple[TokenLogprobs, ...]] = {}

    async def add(self, hidden: Buffer, position: int, num_tokens: int) -> None:
        """Scores what stands behind each token of a chunk: bfloat16 `[tokens, hidden]`. A few at a time, so that others
        wait for no more than that."""
        rows = rows_of(hidden, num_tokens)
        for start in range(0, num_tokens, SCORED_TOKENS):
            end = min(start + SCORED_TOKENS, num_tokens)
            # Behind the last token nothing is known.
            targets = self._prompt[position + start + 1 : position + end + 1]
            if targets:
                piece = b"".join(rows[start : start + len(targets)])
                work = ScoreWork(self._model_id, piece, targets, self._top_logprobs)
                self._pieces[position + start] = await self._runner.submit(work)

    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of each token but the first, when all chunks are there."""
        found = tuple(one for start in sorted(self._pieces) for one in self._pieces[start])
        assert len(found) == len(self._prompt) - 1, "each token of the prompt is scored once"
        return found
