"""The entry point of this node: which generations run, which wait for room, and how each one ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, Collection
from dataclasses import replace

from meshnet.errors import (
    BrokenLayers,
    BrokenNode,
    Draining,
    HopFailure,
    InvalidRequest,
    KvFull,
    MeshnetError,
    NotFinite,
)
from meshnet.hop_cost import Wish
from meshnet.routing import Route
from meshnet.speculate import Speculate
from meshnet.wire import Prefix
from services.node.config import NodeConfig
from services.node.constraint import Constraints
from services.node.core.in_flight import InFlight
from services.node.core.recovery import Recovery, rest_of
from services.node.core.request import Emitted, GenerationRequest, check_request
from services.node.core.speculation import DraftCounts, MeasuredLimit, NewLimit, no_drafts
from services.node.events import Progress
from services.node.forwarding import Forwarding
from services.node.generation import Sequence
from services.node.lane import Lanes
from services.node.prober import Prober
from services.node.rerouting import RouteSearch
from services.node.reuse import PrefixReuse, Wanted

RETRY_AFTER_SECONDS = 2.0

log = logging.getLogger(__name__)


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
        self.constraints = Constraints()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Emitted, None]:
        """The tokens of a generation. Ends without a finish reason if `abort` was called.

        Leaving the iteration early stops the work and frees the session on every hop. A hop that fails is a pause: the
        tokens so far are computed anew on another route. Raises InvalidRequest, UnknownModel,
        UnknownVocabulary, MissingLayers, KvFull, or what a hop failed with if there is no route in time.
        """
        if self._forwarding.draining:
            raise Draining("this node is leaving the mesh")
        if request.request_id in self._running:
            raise InvalidRequest(f"generation {request.request_id} is running already")
        progress = Progress(Recovery(self._config.resume_timeout))
        task = asyncio.create_task(self._run(request, progress))
        self._running[request.request_id] = task
        # However the task ends, also cancelled before it began, the reader must learn of it.
        task.add_done_callback(lambda _: self._running.pop(request.request_id, None))
        try:
            async for event in progress.until_done(task):
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
        self.constraints.close()

    async def _run(self, request: GenerationRequest, progress: Progress) -> None:
        """Whatever hops do: from each failure it goes on, as if there had been none, while there is a route."""
        if request.seed is None:
            request = replace(request, seed=secrets.randbits(64))
        route, rest = self._route(request), request
        while True:
            failure = await self._attempt(rest, route, progress)
            if failure is None:
                return
            route = await self._route_behind(failure, request, progress)
            rest = rest_of(request, progress.generated, str(uuid.uuid4()), has_begun=progress.has_begun)

    async def _route_behind(self, error: MeshnetError, request: GenerationRequest, progress: Progress) -> Route:
        """A route to go on through after a failure. Raises it if there is none in time."""
        if isinstance(error, HopFailure) and error.node_id == self._config.node_id:
            # Every route from here begins with it. Whoever asked may know other nodes to go on at.
            raise error
        recovery, clock = progress.recovery, asyncio.get_running_loop().time
        pause = recovery.failed(error, clock(), has_begun=progress.has_begun)
        assert recovery.deadline
        num_generated = len(progress.generated)
        log.warning("generation %s goes on behind %d tokens: %s", request.request_id, num_generated, error)
        await asyncio.sleep(min(pause, max(recovery.deadline - clock(), 0.0)))
        search = RouteSearch(self._prober, request.model_id, lambda: self._route(request, recovery.avoided(clock())))
        if not progress.has_computed:
            return await search.at_once(self._forwarding.changes, error)
        return await search.until(self._forwarding.changes, recovery.deadline, error)

    def _route(self, request: GenerationRequest, avoid: Collection[str] = ()) -> Route:
        spread = zlib.crc32(request.request_id.encode())
        wish = Wish(spread, self._in_flight.unseen(time.monotonic()), request.num_tokens)
        return self._prober.route(request.model_id, wish, avoid)

    async def _attempt(self, request: GenerationRequest, route: Route, progress: Progress) -> MeshnetError | None:
        """Returns what it failed with once it was admitted; raises what kept it from being admitted."""
        ledger = self._forwarding.sessions.ledger(request.model_id)
        model = self._prober.deployed(request.model_id)
        check_request(request, model, ledger.capacity_tokens)
        constraint = None
        if request.grammar:
            constraint = await self.constraints.open(request, request.grammar, model.manifest.vocab_size)
        sequence = Sequence(request, route, self._forwarding, self._lanes, self._new_limit(), constraint)
        self._in_flight.begin(request.request_id, route, time.monotonic())
        try:
            # To score a prompt all of it must be computed.
            wanted = self._reuse.wanted(sequence.key, route, request.prompt, reuses=not request.prompt_logprobs)
            await self._reuse.until_settled(wanted)
            sequence.prefix = await self._admit(wanted, request.num_tokens)
            return await self._generate(sequence, request, progress, wanted)
        finally:
            self._in_flight.end(request.request_id)

    async def _generate(
        self, sequence: Sequence, request: GenerationRequest, progress: Progress, wanted: Wanted
    ) -> MeshnetError | None:
        emitted: list[int] = []
        try:
            async for event in sequence.tokens():
                progress.has_computed = True
                if not emitted:
                    self._reuse.prefilled(wanted, sequence)
                if event.token_id is not None:
                    emitted.append(event.token_id)
                await progress.put(event, sequence.num_reused)
        except MeshnetError as raised:
            error = self._blamed(raised, sequence)
            progress.has_computed |= sequence.num_cached > 0
            if isinstance(error, HopFailure):
                self._prober.generation_failed(request.model_id, error)
            # Not waited for: a hop that is mute would hold up what goes on without it.
            self._reuse.begin_end(wanted, sequence, emitted, keep=False)
            return error
        except BaseException as error:
            await self._reuse.end(wanted, sequence, emitted, keep=isinstance(error, asyncio.CancelledError))
            raise
        else:
            await self._reuse.end(wanted, sequence, emitted, keep=True)
            return None
        finally:
            self.draft_counts.add(sequence.draft_counts)

    def _blamed(self, error: MeshnetError, sequence: Sequence) -> MeshnetError:
        """Of values that are not finite: the node that made them."""
        if isinstance(error, BrokenLayers):
            return self._forwarding.blamed_here(error, sequence.key)
        if isinstance(error, NotFinite):
            node_id = sequence.route[-1].node_id
            return BrokenNode(f"node {node_id}: {error}", node_id)
        return error

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
