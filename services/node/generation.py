"""What an entry node does for a prompt: admit it, prefill it in chunks, then decode token by token.

Everything but the KV caches lives here: token history, randomness, stop rules. The other hops know only frames.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

from meshnet.chunks import MAX_CHUNKS_IN_FLIGHT, chunk_tokens
from meshnet.errors import PositionMismatch
from meshnet.topology import Hop
from meshnet.wire import FrameHeaders, Prefix
from services.node.constraint import Constraint
from services.node.core.batching import DECODED_TOKENS, chunk_starts
from services.node.core.choices import Allowed, Choice
from services.node.core.history import History
from services.node.core.request import Emitted, FinishReason, GenerationRequest
from services.node.core.sessions import Piece
from services.node.core.speculation import DraftCounts, DraftLimit, Drafts, FixedLimit
from services.node.core.work import Buffer, PromptWork, Segment, SessionKey, rows_of
from services.node.drawing import Draws, draw
from services.node.forwarding import Forwarding
from services.node.lane import Lane, Lanes
from services.node.scoring import PromptScores

log = logging.getLogger(__name__)


class Sequence:
    """One admitted session: runs its tokens through the route and draws new ones.

    `route` begins with this node. The session must have been opened in the session table, with `prefix` if it has one.
    `limit`: how much to draft, default nothing. `constraint`: of the request's grammar, if it has one. `num_cached`:
    tokens of the prompt that all nodes are known to have.
    """

    def __init__(
        self,
        request: GenerationRequest,
        route: tuple[Hop, ...],
        forwarding: Forwarding,
        lanes: Lanes,
        limit: DraftLimit | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self._request = request
        self._constraint = constraint
        self._forwarding = forwarding
        self._lanes = lanes
        self.route = route
        self._node_id = route[0].node_id
        self._layers = route[0].layers
        self._behind = route[1:]
        self._hidden_size = forwarding.shards.manifest(request.model_id).hidden_size
        self._history = History(request, random.Random(request.seed))  # noqa: S311 (draws that a seed repeats, no secret)
        self._drafts = Drafts(request.prompt, limit or FixedLimit(0))
        self._scores = _scores(request, forwarding) if request.prompt_logprobs else None
        self.key = SessionKey(request.request_id, request.model_id, self._layers)
        self.prefix: Prefix | None = None
        self.prefix_lost = False
        self.num_cached = 0

    @property
    def num_reused(self) -> int:
        """Tokens of the prompt that are not computed."""
        return self.prefix.num_tokens if self.prefix and not self.prefix_lost else 0

    def cached_tokens(self, emitted: Items[int]) -> tuple[int, ...]:
        """The tokens that all nodes are known to have when so many have been emitted: never the last one."""
        prompt = self._request.prompt
        return (*prompt, *emitted[:-1]) if emitted else prompt[: self.num_cached]

    async def tokens(self) -> AsyncIterator[Emitted]:
        """New tokens as they are drawn; the last one has a finish reason. If none is asked for, one event without."""
        hidden = await self._prefill(self._request.prompt)
        prompt_logprobs = self._scores.logprobs() if self._scores else ()
        if not self._request.max_new_tokens:
            yield Emitted(None, FinishReason.LENGTH, prompt_logprobs=prompt_logprobs)
            return
        draft, allowed = await self._allowed(())
        if _is_over(allowed):
            yield Emitted(None, FinishReason.STOP, prompt_logprobs=prompt_logprobs)
            return
        lane = self._lanes.join(self._request.model_id, self.route)
        count = 0
        try:
            drawn: Items[Choice | BaseException] = await draw(
                self._forwarding.runner, self._draws(draft, allowed).works(self._request.model_id, hidden)
            )
            while True:
                for choice in _until_failed(self._drafts.settle(draft, drawn)):
                    token = choice.token_id
                    count += 1
                    self._emitted(token)
                    reason = self._finish_reason(token, count)
                    logprobs_once = prompt_logprobs if count == 1 else ()
                    yield Emitted(token, reason, logprobs=choice.logprobs, prompt_logprobs=logprobs_once)
                    if reason:
                        return
                # No more than may be emitted behind the next token: for that many there is room on all hops.
                room = self._request.max_new_tokens - count - 1
                draft, allowed = await self._allowed(self._drafts.next(room, lane.cost, lane.num_rows))
                if _is_over(allowed):
                    yield Emitted(None, FinishReason.STOP)
                    return
                position = len(self._request.prompt) + count - 1
                drawn = await self._step(lane, (token, *draft), position, self._draws(draft, allowed))
        finally:
            self._lanes.leave(self._request.model_id, self.route)
            log.debug("generation %s: %s", self._request.request_id, self.draft_counts)

    @property
    def draft_counts(self) -> DraftCounts:
        return self._drafts.counts

    def _emitted(self, token: int) -> None:
        self._history.emitted(token)
        self._drafts.emitted(token)
        if self._constraint:
            self._constraint.emitted(token)

    async def _allowed(self, draft: tuple[int, ...]) -> tuple[tuple[int, ...], Items[Allowed] | None]:
        """As much of a draft as the grammar allows, and what it lets follow on the text and on each token of that."""
        return await self._constraint.allowed(draft) if self._constraint else (draft, None)

    async def _step(
        self, lane: Lane, tokens: tuple[int, ...], position: int, draws: Draws
    ) -> Items[Choice | BaseException]:
        """Runs the last token and a draft through the route and draws one behind each."""
        started = time.monotonic()
        step = await lane.step(self.key, tokens, position, draws)
        lane.cost.add(step.num_tokens, time.monotonic() - started, 1 / step.num_rows)
        return step.drawn

    def _draws(self, draft: tuple[int, ...], allowed: Items[Allowed] | None) -> Draws:
        """Behind the text as it is, and behind each token of a draft."""
        history, request = self._history, self._request
        uniforms = history.uniforms(1 + len(draft))
        return Draws(request.sampling, uniforms, history.places(draft, allowed), request.top_logprobs)

    def _finish_reason(self, token: int, count: int) -> FinishReason | None:
        if token in self._request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == self._request.max_new_tokens else None

    async def _prefill(self, tokens: tuple[int, ...]) -> Buffer:
        """Runs the prompt, or what is behind its prefix. Returns the last position's output."""
        try:
            return await self._run_prompt(tokens, self.num_reused)
        except PositionMismatch:
            if not self.num_reused or self.num_cached:
                raise
        # A node no longer has what it kept, and says so before anything else of the prompt is under way.
        await self._lose_prefix()
        return await self._run_prompt(tokens, 0)

    async def _run_prompt(self, tokens: tuple[int, ...], begin: int) -> Buffer:
        """Runs the prompt from `begin` on; chunk i+1 leaves while chunk i is still travelling."""
        is_busy = self._lanes.are_busy(self._request.model_id)
        starts = self._starts(begin, self._forwarding.runner.executor.busy_chunk_tokens if is_busy else None)
        under_way: deque[asyncio.Task[Buffer]] = deque()
        try:
            for index, start in enumerate(starts):
                # Behind a prefix nothing leaves before all nodes are known to have that.
                if len(under_way) == MAX_CHUNKS_IN_FLIGHT or (begin and index == 1):
                    await under_way.popleft()
                if is_busy:
                    await self._lanes.beside_frame(self._request.model_id)
                chunk = tokens[start : starts[index + 1] if index + 1 < len(starts) else None]
                local = await self._run_local(chunk, start, last=index + 1 == len(starts))
                send = self._send_on(local, len(chunk), start, chunk=(index, len(starts)))
                under_way.append(asyncio.create_task(send))
            while len(under_way) > 1:
                await under_way.popleft()
            return await under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    def _starts(self, begin: int, size: int | None) -> list[int]:
        """Where chunks begin. What was generated before goes in steps as short as those that it came of: longer ones
        round otherwise, and what follows would not be to the bit what it was to be."""
        total = len(self._request.prompt)
        generated = max(begin, total - self._request.num_generated)
        size = size or chunk_tokens(generated - begin, len(self.route))
        return [*chunk_starts(begin, generated, size), *range(generated, total, DECODED_TOKENS)]

    async def _run_local(self, tokens: tuple[int, ...], position: int, *, last: bool) -> Buffer:
        await self._forwarding.accept([Piece(self.key, position, len(tokens))], first_chunk=True)
        num_returned = len(tokens) if self._behind or self._scores else int(last)
        segment = Segment(self.key, position, len(tokens), num_returned)
        return await self._forwarding.run(PromptWork(self._request.model_id, self._layers, (segment,), tokens))

    async def _send_on(self, hidden: Buffer, num_tokens: int, position: int, chunk: tuple[int, int]) -> Buffer:
        """Of the last chunk, the last position's output."""
        if self._behind:
            hidden = await self._pass_on(hidden, num_tokens, position, chunk)
        self.num_cached = max(self.num_cached, position + num_tokens)
        if self._scores:
            await self._scores.add(hidden, position, num_tokens)
            return rows_of(hidden, num_tokens)[-1]
        return hidden

    async def _pass_on(self, hidden: Buffer, num_tokens: int, position: int, chunk: tuple[int, int]) -> Buffer:
        is_last = chunk[0] + 1 == chunk[1]
        frame = FrameHeaders(
            rows=1,
            positions=num_tokens,
            hidden=self._hidden_size,
            sessions=(self._request.request_id,),
            chunk_index=chunk[0],
            chunk_total=chunk[1],
            model=self._request.model_id,
            cached=(position,),
            returns=num_tokens if self._scores else int(is_last),
            entry=self._node_id,
            prefix=self.prefix if self.num_reused and position == self.num_reused else None,
        )
        return await self._forwarding.send_and_return(frame, self._behind, hidden)

    async def close(self, num_kept: int = 0) -> None:
        """Frees the session on every hop, or keeps its first tokens."""
        if self.prefix and self.prefix.take and not self.prefix_lost and not self.num_cached:
            # Taken here, and perhaps not everywhere.
            await self._forwarding.free(self.prefix.session, self._behind)
        await self._forwarding.free(self._request.request_id, self._behind, num_kept)

    async def _lose_prefix(self) -> None:
        """Begins anew, without it. It is of no use to anybody else."""
        assert self.prefix
        self.prefix_lost = True
        if replace(self.key, session=self.prefix.session) not in self._forwarding.sessions:
            await self._forwarding.free(self.prefix.session, self._behind)
        if self.key not in self._forwarding.sessions:
            self._forwarding.open(self.key, self._request.num_tokens)


def _is_over(allowed: Items[Allowed] | None) -> bool:
    """Whether the grammar has ended and no stop token can say so."""
    return allowed is not None and allowed[0].is_nothing


def _scores(request: GenerationRequest, forwarding: Forwarding) -> PromptScores:
    return PromptScores(request.model_id, request.prompt, request.top_logprobs or 0, forwarding.runner)


def _until_failed(outcomes: Iterable[Choice | BaseException]) -> Iterator[Choice]:
    """Choices, up to the first draw that failed: raises what it failed with."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        yield outcome
