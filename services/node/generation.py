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
from dataclasses import dataclass, replace
from enum import StrEnum

from meshnet.errors import InvalidRequest, PositionMismatch
from meshnet.topology import DeployedModel, Hop
from meshnet.wire import FrameHeaders, Prefix
from services.node.core.drafts import Uniforms
from services.node.core.sessions import Piece
from services.node.core.speculation import DraftCounts, DraftLimit, Drafts, FixedLimit
from services.node.core.work import Buffer, PromptWork, SampleWork, Sampling, Segment, SessionKey
from services.node.forwarding import Forwarding
from services.node.lane import Lane, Lanes

CHUNK_TOKENS = 128
# While others decode here: they wait for a chunk in each step, and a step of so many tokens takes hardly longer.
BUSY_CHUNK_TOKENS = 32
# Chunks of one prompt under way at once: enough to keep a long pipeline full, few enough to bound its memory.
MAX_CHUNKS_IN_FLIGHT = 16
GREEDY = Sampling()

log = logging.getLogger(__name__)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`seed` None draws a fresh one. A token of `stop_token_ids` is emitted and ends the generation."""

    request_id: str
    model_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token, and in the last event why there are no more. In the first: tokens of the prompt that were reused."""

    token_id: int
    finish_reason: FinishReason | None
    cached_tokens: int = 0


def check_request(request: GenerationRequest, model: DeployedModel, kv_capacity: int) -> None:
    """Raises InvalidRequest, with what is right, for anything that could not be generated.

    `kv_capacity` is the room of an empty KV cache here, in tokens.
    """
    prompt_tokens, total = len(request.prompt), len(request.prompt) + request.max_new_tokens
    if not request.prompt:
        raise InvalidRequest("the prompt is empty: it needs at least one token")
    if request.max_new_tokens < 1:
        raise InvalidRequest("max_new_tokens must be at least 1")
    limit = min(model.context_length, kv_capacity)
    if total > limit:
        raise InvalidRequest(
            f"{prompt_tokens} prompt tokens and {request.max_new_tokens} new ones are {total}, the limit is {limit}"
        )
    if (largest := max(request.prompt)) >= model.manifest.vocab_size:
        raise InvalidRequest(f"token id {largest} is not in the vocabulary of {model.manifest.vocab_size} tokens")
    sampling = request.sampling
    if not sampling.temperature >= 0 or sampling.temperature == float("inf"):
        raise InvalidRequest(f"temperature {sampling.temperature} must be a number of at least 0")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p {sampling.top_p} must be over 0 and at most 1")


class Sequence:
    """One admitted session: runs its tokens through the route and draws new ones.

    `route` begins with this node. The session must have been opened in the session table, with `prefix` if it has one.
    `limit`: how much to draft, default nothing. `num_cached`: tokens of the prompt that all nodes are known to have.
    """

    def __init__(
        self,
        request: GenerationRequest,
        route: tuple[Hop, ...],
        forwarding: Forwarding,
        lanes: Lanes,
        limit: DraftLimit | None = None,
    ) -> None:
        self._request = request
        self._forwarding = forwarding
        self._lanes = lanes
        self._route = route
        self._node_id = route[0].node_id
        self._layers = route[0].layers
        self._behind = route[1:]
        self._hidden_size = forwarding.shards.manifest(request.model_id).hidden_size
        self._uniforms = Uniforms(random.Random(request.seed))  # noqa: S311 (draws that a seed repeats, no secret)
        self._drafts = Drafts(request.prompt, limit or FixedLimit(0))
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
        """New tokens as they are drawn; the last one has a finish reason."""
        hidden = await self._prefill(self._request.prompt)
        lane = self._lanes.join(self._request.model_id, self._route)
        count = 0
        draft: tuple[int, ...] = ()
        try:
            drawn = await self._draw(hidden, 1)
            while True:
                for token in _until_failed(self._drafts.settle(draft, drawn)):
                    count += 1
                    self._emitted(token)
                    reason = self._finish_reason(token, count)
                    yield Emitted(token, reason)
                    if reason:
                        return
                # No more than may be emitted behind the next token: for that many there is room on all hops.
                room = self._request.max_new_tokens - count - 1
                draft = self._drafts.next(room, lane.cost, lane.num_rows)
                drawn = await self._step(lane, (token, *draft), len(self._request.prompt) + count - 1)
        finally:
            self._lanes.leave(self._request.model_id, self._route)
            log.debug("generation %s: %s", self._request.request_id, self.draft_counts)

    @property
    def draft_counts(self) -> DraftCounts:
        return self._drafts.counts

    def _emitted(self, token: int) -> None:
        self._uniforms.emitted()
        self._drafts.emitted(token)

    async def _step(self, lane: Lane, tokens: tuple[int, ...], position: int) -> list[int | BaseException]:
        """Runs tokens through the route and draws one behind each."""
        started = time.monotonic()
        step = await lane.step(self.key, tokens, position)
        drawn = await self._draw(step.hidden, len(tokens))
        lane.cost.add(step.num_tokens, time.monotonic() - started, 1 / step.num_rows)
        return drawn

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
        size = BUSY_CHUNK_TOKENS if self._lanes.are_busy(self._request.model_id) else CHUNK_TOKENS
        starts = range(begin, len(tokens), size)
        under_way: deque[asyncio.Task[Buffer]] = deque()
        try:
            for index, start in enumerate(starts):
                # Behind a prefix nothing leaves before all nodes are known to have that.
                if len(under_way) == MAX_CHUNKS_IN_FLIGHT or (begin and index == 1):
                    await under_way.popleft()
                chunk = tokens[start : start + size]
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

    async def _run_local(self, tokens: tuple[int, ...], position: int, *, last: bool) -> Buffer:
        await self._forwarding.accept([Piece(self.key, position, len(tokens))], first_chunk=True)
        num_returned = len(tokens) if self._behind else int(last)
        segment = Segment(self.key, position, len(tokens), num_returned)
        return await self._forwarding.run(PromptWork(self._request.model_id, self._layers, (segment,), tokens))

    async def _send_on(self, hidden: Buffer, num_tokens: int, position: int, chunk: tuple[int, int]) -> Buffer:
        if self._behind:
            hidden = await self._pass_on(hidden, num_tokens, position, chunk)
        self.num_cached = max(self.num_cached, position + num_tokens)
        return hidden

    async def _pass_on(self, hidden: Buffer, num_tokens: int, position: int, chunk: tuple[int, int]) -> Buffer:
        frame = FrameHeaders(
            rows=1,
            positions=num_tokens,
            hidden=self._hidden_size,
            sessions=(self._request.request_id,),
            chunk_index=chunk[0],
            chunk_total=chunk[1],
            model=self._request.model_id,
            cached=(position,),
            returns=int(chunk[0] + 1 == chunk[1]),
            entry=self._node_id,
            prefix=self.prefix if self.num_reused and position == self.num_reused else None,
        )
        return await self._forwarding.send_and_return(frame, self._behind, hidden)

    async def _draw(self, hidden: Buffer, count: int) -> list[int | BaseException]:
        """A token behind each of so many positions, each with the draw that is its own, or why there is none."""
        rows = memoryview(hidden).cast("B")
        size = rows.nbytes // count
        works = [
            SampleWork(self._request.model_id, rows[index * size : (index + 1) * size], self._request.sampling, uniform)
            for index, uniform in enumerate(self._uniforms.next(count))
        ]
        outcomes: list[int | BaseException] = await asyncio.gather(
            *self._forwarding.runner.submit_all(works), return_exceptions=True
        )
        return outcomes

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
            self._forwarding.open(self.key, len(self._request.prompt) + self._request.max_new_tokens)


def _until_failed(outcomes: Iterable[int | BaseException]) -> Iterator[int]:
    """Tokens, up to the first draw that failed: raises what it failed with."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        yield outcome
