"""The gateway's side of the mesh: the topology as the tracker tells it, and generations on entry nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Collection

import grpc
import grpc.aio

from meshnet import convert, rpc
from meshnet.errors import (
    BrokenNode,
    Draining,
    KvFull,
    MeshnetError,
    MissingLayers,
    NextHopFailed,
    NextHopTimeout,
    PositionMismatch,
    RouteNotReady,
    Unauthenticated,
    UnknownModel,
    UnknownVocabulary,
    Unregistered,
    WrongLayers,
)
from meshnet.security.shared_secret import SharedSecret
from meshnet.topology import Node, Topology
from meshnet.v1 import inference_pb2_grpc, tracker_pb2, tracker_pb2_grpc
from services.gateway.api_errors import ApiError, from_code
from services.gateway.attempts import Attempts
from services.gateway.entry import pick_entry
from services.gateway.entry_watch import MUTE_SECONDS, EntryWatch
from services.gateway.generation import FinishReason, Generation, Progress, TokenEvent
from services.gateway.inference_proto import from_proto, to_proto, vocabulary_to_proto

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.5
# A request waits this long for a route of a complete model to become ready, or so long if it is known why none is.
READY_SECONDS = 5.0
FAILED_SECONDS = 0.5
# Before one that has begun goes back to where it failed.
AGAIN_SECONDS = 1.0
# With these an entry node refuses a generation that another one may take, or gives up one for which it has no route.
_ELSEWHERE = frozenset(
    kind.code
    for kind in (
        BrokenNode, Draining, KvFull, MissingLayers, NextHopFailed, NextHopTimeout, PositionMismatch, UnknownModel,
        Unregistered, WrongLayers,
    )
)  # fmt: skip


class EntryNodeLost(Exception):
    """The connection to an entry node failed, or it refused what another may take. Carries the answer to give."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class _VocabularyWanted(Exception):
    """An entry node must be given the vocabulary of a grammar first."""


class EntryChannel:
    """The channel to one entry node, and how many generations run over it."""

    def __init__(self, address: str, secret: SharedSecret | None) -> None:
        self.channel = rpc.channel(address, secret)
        self.num_calls = 0


class MeshClient:
    """Holds the channels to the tracker and to entry nodes. Belongs to one event loop."""

    def __init__(
        self, tracker: str, request_timeout: float, resume_timeout: float = 60.0, secret: SharedSecret | None = None
    ) -> None:
        self.tracker = tracker
        self.topology: Topology | None = None
        self.tracker_connected = False
        self._request_timeout = request_timeout
        self._resume_timeout = resume_timeout
        self._secret = secret
        self._channels: dict[str, EntryChannel] = {}
        self._turns = itertools.count()
        self._topology_changed = asyncio.Event()
        self.entry_watch = EntryWatch()

    async def watch_topology(self) -> None:
        """Follows the topology for ever. While the tracker is away, the last one stays in use."""
        said = None
        while True:
            # A connection of its own each time: one whose bytes were changed on their way may never recover.
            async with rpc.channel(self.tracker, self._secret) as channel:
                reason = await self._follow(tracker_pb2_grpc.TrackerStub(channel))
            if self.tracker_connected or reason != said:
                log.warning("waiting for the tracker at %s: %s", self.tracker, reason)
                said = reason
            self.tracker_connected = False
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _follow(self, stub: tracker_pb2_grpc.TrackerStub) -> str:
        """Follows one stream to its end; returns why it ended."""
        try:
            topology = Topology()
            async for message in stub.WatchTopology(tracker_pb2.WatchTopologyRequest()):
                topology = topology.updated(rpc.decoded(message, convert.update_from_proto))
                self.set_topology(topology)
                if not self.tracker_connected:
                    log.info("following the topology of the tracker at %s", self.tracker)
                self.tracker_connected = True
                await self._close_unused_channels()
        except grpc.aio.AioRpcError as error:
            return str(error.details() or error.code().name)
        except MeshnetError as error:
            return f"it sent a topology that makes no sense: {error}"
        except asyncio.CancelledError:
            if rpc.is_being_cancelled():
                raise
            return "it cancelled the stream"
        return "it ended the stream"

    async def generate(self, generation: Generation) -> AsyncGenerator[TokenEvent, None]:
        """Tokens until the end. If an entry node is lost, another goes on from the tokens that are known.

        Closing the iterator cancels the work on every hop. Raises MissingLayers or ApiError.
        """
        deadline = asyncio.get_running_loop().time() + self._request_timeout
        progress, attempts = Progress(generation, []), Attempts(self._resume_timeout)
        rest = generation
        while (node := await self._pick(progress, attempts)) is not None:
            try:
                async with contextlib.aclosing(self._stream(node, rest, deadline)) as events:
                    async for event in events:
                        progress.received(event)
                        attempts.progressed()
                        yield event
                return
            except EntryNodeLost as error:
                num_tokens = len(progress.token_ids)
                log.warning("entry node %s left a generation after %d tokens: %s", node.node_id, num_tokens, error)
                if progress.is_whole:
                    yield TokenEvent(None, FinishReason.LENGTH)
                    return
                attempts.failed(node.node_id, error.error, asyncio.get_running_loop().time())
                rest = progress.rest(str(uuid.uuid4()))
        assert attempts.error, "the first turn finds an entry node or raises"
        raise attempts.error

    async def entry_node(
        self, model_id: str, turn: int, avoid: Collection[str] = (), *, resumes: bool = False
    ) -> Node | None:
        """As `pick_entry`; while no route of a complete model is ready, the next topologies are waited for a little.
        `resumes`: for a generation that has begun; also while layers are missing, and longer.

        Raises what `pick_entry` raises, or ApiError (503) while there is no topology.
        """
        began = asyncio.get_running_loop().time()
        while True:
            changed = self._topology_changed
            if self.topology is None:
                raise no_topology(self.tracker)
            try:
                return pick_entry(self.topology, model_id, turn, avoid, self._calls(self.topology))
            except (RouteNotReady, MissingLayers) as error:
                seconds = self._resume_timeout if resumes else _patience(error)
                if not await _happens(changed, began + seconds):
                    raise

    def _calls(self, topology: Topology) -> dict[str, int]:
        """Generations under way from here, by entry node."""
        return {
            node.node_id: self._channels[node.grpc_address].num_calls
            for node in topology.nodes.values()
            if node.grpc_address in self._channels
        }

    def set_topology(self, topology: Topology) -> None:
        self.topology = topology
        self._topology_changed.set()
        self._topology_changed = asyncio.Event()

    async def _pick(self, progress: Progress, attempts: Attempts) -> Node | None:
        """The entry node to go on at. None: there is none, and what the last one said is the answer.

        A generation that has begun waits for one, also for those that it was at before.
        """
        model_id, resumes = progress.generation.model_id, attempts.error is not None and progress.has_begun
        while attempts.may_go_on(asyncio.get_running_loop().time(), has_begun=progress.has_begun):
            changed = self._topology_changed
            try:
                node = await self.entry_node(model_id, next(self._turns), attempts.tried, resumes=resumes)
            except MeshnetError:
                if attempts.error is None:
                    raise
                return None
            if node is not None or not resumes:
                return node
            await _happens(changed, asyncio.get_running_loop().time() + AGAIN_SECONDS)
            attempts.tried.clear()
        return None

    async def _stream(self, node: Node, generation: Generation, deadline: float) -> AsyncGenerator[TokenEvent, None]:
        """One call to one entry node; one more, if it has to be given the vocabulary of a grammar first. Raises
        EntryNodeLost or ApiError."""
        async with contextlib.aclosing(self._call(node, generation, deadline)) as events:
            try:
                async for event in events:
                    yield event
                return
            except _VocabularyWanted:
                pass
        await self._put_vocabulary(node, generation, deadline)
        async with contextlib.aclosing(self._call(node, generation, deadline)) as events:
            try:
                async for event in events:
                    yield event
            except _VocabularyWanted:
                raise _entry_node_failed(node, "it does not keep the vocabulary that it was given") from None

    async def _put_vocabulary(self, node: Node, generation: Generation, deadline: float) -> None:
        assert generation.form is not None, "only grammars are in a vocabulary"
        stub = inference_pb2_grpc.InferenceStub(self._channel(node).channel)
        try:
            await stub.PutVocabulary(vocabulary_to_proto(generation.form.vocabulary), timeout=_seconds_left(deadline))
        except grpc.aio.AioRpcError as error:
            raise _translated(error, node) from error

    def _channel(self, node: Node) -> EntryChannel:
        return self._channels.setdefault(node.grpc_address, EntryChannel(node.grpc_address, self._secret))

    async def _call(self, node: Node, generation: Generation, deadline: float) -> AsyncGenerator[TokenEvent, None]:
        """Raises EntryNodeLost, ApiError or _VocabularyWanted."""
        channel = self._channel(node)
        channel.num_calls += 1
        stub = inference_pb2_grpc.InferenceStub(channel.channel)
        call = stub.Generate(to_proto(generation), timeout=_seconds_left(deadline))
        try:
            with self.entry_watch.watched(node.grpc_address, channel.channel, call) as watched:
                async for message in call:
                    event = rpc.decoded(message, from_proto)
                    yield event
                    if event.finish_reason is not None:
                        return
                    watched.heard()
        except grpc.aio.AioRpcError as error:
            if rpc.error_code(error) == UnknownVocabulary.code:
                raise _VocabularyWanted from None
            raise _translated(error, node) from error
        except rpc.Garbled as error:
            raise _entry_node_failed(node, f"its answer was changed on its way: {error}") from error
        except asyncio.CancelledError:
            if rpc.is_being_cancelled():
                raise
        finally:
            call.cancel()
            channel.num_calls -= 1
        mute = f"it is mute: no health check within {MUTE_SECONDS:g} s"
        raise _entry_node_failed(node, mute if watched.is_mute else "it ended the stream early")

    async def _close_unused_channels(self) -> None:
        assert self.topology is not None, "the stream has just brought one"
        # A node that leaves still finishes the generations that it has.
        addresses = {node.grpc_address for node in self.topology.nodes.values()}
        unused = [a for a, channel in self._channels.items() if a not in addresses and not channel.num_calls]
        for address in unused:
            await self._channels.pop(address).channel.close(grace=None)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.channel.close(grace=None)


def _seconds_left(deadline: float) -> float:
    """On the loop's clock."""
    return max(deadline - asyncio.get_running_loop().time(), 0.001)


async def _happens(event: asyncio.Event, deadline: float) -> bool:
    """Whether the event is set by then, on the loop's clock."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            return await event.wait()
    return False


def _patience(error: RouteNotReady | MissingLayers) -> float:
    if isinstance(error, MissingLayers):
        return 0.0
    return FAILED_SECONDS if error.is_known else READY_SECONDS


def no_topology(tracker: str) -> ApiError:
    return ApiError(503, f"No topology yet: waiting for the tracker at {tracker}.", code="no_topology", retry_after=2.0)


def _translated(error: grpc.aio.AioRpcError, node: Node) -> Exception:
    """The one boundary where errors of gRPC become ours."""
    code = rpc.error_code(error)
    if code == Unauthenticated.code:
        # This gateway's client is not at fault, and another entry node may have the right tokens.
        return _entry_node_failed(node, error.details() or code)
    if code is not None:
        wait = rpc.trailer(error, rpc.RETRY_AFTER_KEY)
        answer = from_code(code, error.details() or code, _seconds(wait))
        return EntryNodeLost(answer) if code in _ELSEWHERE else answer
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ApiError(504, "The generation took longer than this gateway allows.", code="timeout")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return _entry_node_failed(node, error.details() or "no connection")
    return ApiError(502, f"entry node {node.node_id} failed: {error.details()}", code="entry_node_failed")


def _entry_node_failed(node: Node, reason: str) -> EntryNodeLost:
    message = f"entry node {node.node_id} failed: {reason}"
    return EntryNodeLost(ApiError(502, message, code="entry_node_failed", retry_after=2.0))


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
