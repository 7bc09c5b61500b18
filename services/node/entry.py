"""The entry point of this node: which generations run, which wait for room, and how each one ends."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from meshnet.errors import Draining, HopFailure, InvalidRequest, KvFull
from meshnet.hop_cost import Wish
from meshnet.speculate import Speculate
from meshnet.wire import Prefix
from services.node.config import NodeConfig
from services.node.core.in_flight import InFlight
from services.node.core.speculation import DraftCounts, MeasuredLimit, NewLimit, no_drafts
from services.node.forwarding import Forwarding
from services.node.generation import Emitted, GenerationRequest, Sequence, check_request
from services.node.lane import Lanes
from services.node.prober import Prober
from services.node.reuse import PrefixReuse, Wanted

# Tokens that may wait for a slow reader of the stream before its generation pauses.
MAX_UNREAD_TOKENS = 64
RETRY_AFTER_SECONDS = 2.0

# None only wakes the reader.
Event = Emitted | None


class EntryPoint:
    """Runs generations for sessions that begin here. `prober` chooses their routes and learns of hops that fail.

    `new_limit`: how much each session drafts, default what the configuration says.
    """

    def __init__(
        self, config: NodeConfig, forwarding: Forwarding, prober: Prober, new_limit: NewLimit | None = None
    ) -> None:
        self._config = config
        self._forwarding = forwarding
        self._prober = prober
        self._running: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._in_flight = InFlight()
        self._lanes = Lanes(forwarding)
        self._new_limit = new_limit or (MeasuredLimit if config.speculate is Speculate.AUTO else no_drafts)
        self.draft_counts = DraftCounts()
        self._reuse = PrefixReuse(forwarding, enabled=config.prefix_reuse)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Emitted, None]:
        """The tokens of a generation. Ends without a finish reason if `abort` was called.

        Leaving the iteration early stops the work and frees the session on every hop. Raises InvalidRequest,
        UnknownModel, MissingLayers, KvFull, or what a hop failed with.
        """
        if self._forwarding.draining:
            raise Draining("this node is leaving the mesh")
        if request.request_id in self._running:
            raise InvalidRequest(f"generation {request.request_id} is running already")
        events: asyncio.Queue[Event] = asyncio.Queue(MAX_UNREAD_TOKENS)
        task = asyncio.create_task(self._run(request, events))
        self._running[request.request_id] = task
        # However the task ends, also cancelled before it began, the reader must learn of it.
        task.add_done_callback(lambda _: self._running.pop(request.request_id, None))
        try:
            async for event in _until_done(task, events):
                yield event
        finally:
            task.cancel()

    async def abort(self, request_id: str) -> None:
        """Stops a generation at its next await and frees its session. Unknown ones are no error."""
        task = self._running.get(request_id)
        if task:
            task.cancel()
            await asyncio.wait([task])

    def check_integrity(self) -> None:
        """Raises AssertionError if what is known of prefixes does not hold together."""
        self._reuse.check_integrity()

    async def stop(self) -> None:
        """Aborts all."""
        for request_id in tuple(self._running):
            await self.abort(request_id)

    async def _run(self, request: GenerationRequest, events: asyncio.Queue[Event]) -> None:
        num_tokens = len(request.prompt) + request.max_new_tokens
        spread = zlib.crc32(request.request_id.encode())
        route = self._prober.route(request.model_id, Wish(spread, self._in_flight.unseen(time.monotonic()), num_tokens))
        ledger = self._forwarding.sessions.ledger(request.model_id)
        check_request(request, self._prober.deployed(request.model_id), ledger.capacity_tokens)
        sequence = Sequence(request, route, self._forwarding, self._lanes, self._new_limit())
        self._in_flight.begin(request.request_id, route, time.monotonic())
        try:
            wanted = self._reuse.wanted(sequence.key, route, request.prompt)
            await self._reuse.until_settled(wanted)
            sequence.prefix = await self._admit(wanted, num_tokens)
            await self._generate(sequence, request, events, wanted)
        finally:
            self._in_flight.end(request.request_id)

    async def _generate(
        self, sequence: Sequence, request: GenerationRequest, events: asyncio.Queue[Event], wanted: Wanted
    ) -> None:
        emitted: list[int] = []
        keep = False
        try:
            async for event in sequence.tokens():
                if not emitted:
                    self._reuse.prefilled(wanted, sequence)
                emitted.append(event.token_id)
                await events.put(event if len(emitted) > 1 else replace(event, cached_tokens=sequence.num_reused))
            keep = True
        except asyncio.CancelledError:
            keep = True
            raise
        except HopFailure as error:
            self._prober.generation_failed(request.model_id, error)
            raise
        finally:
            self.draft_counts.add(sequence.draft_counts)
            await self._reuse.end(wanted, sequence, emitted, keep=keep)

    async def _admit(self, wanted: Wanted, num_tokens: int) -> Prefix | None:
        """Opens the session when there is KV room for all its tokens, in order of arrival. Returns what it begins with.
        Raises KvFull."""
        if self._num_waiting >= self._config.max_waiting:
            raise KvFull(f"{self._num_waiting} prompts wait for KV cache room already", RETRY_AFTER_SECONDS)
        self._num_waiting += 1
        try:
            # One deadline for the turn and for the room.
            async with asyncio.timeout(self._config.admission_timeout), self._turn:
                opened = await self._forwarding.changes.wait_until(lambda: self._open(wanted, num_tokens), within=None)
                assert opened, "the deadline ends the wait, and nothing else"
                return opened[0]
        except TimeoutError:
            waited = self._config.admission_timeout
            raise KvFull(f"no KV cache room came free within {waited:g} s", RETRY_AFTER_SECONDS) from None
        finally:
            self._num_waiting -= 1

    def _open(self, wanted: Wanted, num_tokens: int) -> tuple[Prefix | None] | None:
        try:
            return (self._reuse.open(wanted, num_tokens),)
        except KvFull:
            return None


async def _until_done(task: asyncio.Task[None], events: asyncio.Queue[Event]) -> AsyncGenerator[Emitted, None]:
    """What a task puts into its queue, until the task has ended and the queue is empty. Raises what the task raised."""
    task.add_done_callback(lambda _: _wake(events))
    while True:
        if task.done() and events.empty():
            break
        event = await events.get()
        if isinstance(event, Emitted):
            yield event
    if not task.cancelled():
        task.result()


def _wake(events: asyncio.Queue[Event]) -> None:
    if not events.full():
        events.put_nowait(None)
