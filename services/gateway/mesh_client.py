"""The gateway's side of the mesh: the topology as the tracker tells it, and generations on entry nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, replace
from enum import StrEnum

import grpc
import grpc.aio

from meshnet import convert, rpc
from meshnet.errors import Draining, KvFull, MeshnetError, RouteNotReady, UnknownModel, Unregistered
from meshnet.topology import Node, Topology
from meshnet.v1 import inference_pb2, inference_pb2_grpc, tracker_pb2, tracker_pb2_grpc
from services.gateway.api_errors import ApiError, from_code
from services.gateway.entry import pick_entry

log = logging.getLogger(__name__)

MAX_ENTRY_NODES_TRIED = 3
RECONNECT_SECONDS = 0.5
# A request waits this long for a route of a complete model to become ready.
READY_SECONDS = 5.0
# With these an entry node refuses a generation that another one may take.
_ELSEWHERE = frozenset({KvFull.code, Draining.code, UnknownModel.code, Unregistered.code})


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


_FINISH = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


@dataclass(frozen=True, slots=True)
class Generation:
    """What an entry node is asked for. `seed` None draws a fresh one; `top_k` 0 keeps all tokens."""

    request_id: str
    model_id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token, the end, or both. In the first: how many tokens of the prompt were not computed again."""

    token_id: int | None
    finish_reason: FinishReason | None
    cached_tokens: int = 0


class EntryNodeLost(Exception):
    """The connection to an entry node failed, or it refused what another may take. Carries the answer to give."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class EntryChannel:
    """The channel to one entry node, and how many generations run over it."""

    def __init__(self, address: str) -> None:
        self.channel = rpc.channel(address)
        self.num_calls = 0


class MeshClient:
    """Holds the channels to the tracker and to entry nodes. Belongs to one event loop."""

    def __init__(self, tracker: str, request_timeout: float) -> None:
        self.tracker = tracker
        self.topology: Topology | None = None
        self.tracker_connected = False
        self._request_timeout = request_timeout
        self._channels: dict[str, EntryChannel] = {}
        self._turns = itertools.count()
        self._topology_changed = asyncio.Event()

    async def watch_topology(self) -> None:
        """Follows the topology for ever. While the tracker is away, the last one stays in use."""
        async with rpc.channel(self.tracker) as channel:
            stub = tracker_pb2_grpc.TrackerStub(channel)
            said = None
            while True:
                reason = await self._follow(stub)
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
                topology = topology.updated(convert.update_from_proto(message))
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
        tokens: list[int] = []
        tried: set[str] = set()
        lost: EntryNodeLost | None = None
        while (node := await self._pick(generation, tried, lost)) is not None:
            tried.add(node.node_id)
            try:
                rest = generation if lost is None else _rest(generation, tokens, str(uuid.uuid4()))
                async with contextlib.aclosing(self._stream(node, rest, deadline)) as events:
                    async for event in events:
                        if event.token_id is not None:
                            tokens.append(event.token_id)
                        yield event
                return
            except EntryNodeLost as error:
                log.warning("entry node %s left a generation after %d tokens: %s", node.node_id, len(tokens), error)
                lost = error
                if len(tokens) >= generation.max_new_tokens:
                    yield TokenEvent(None, FinishReason.LENGTH)
                    return
        assert lost is not None, "the first turn finds an entry node or raises"
        raise lost.error

    async def entry_node(self, model_id: str, turn: int, avoid: Collection[str] = ()) -> Node | None:
        """As `pick_entry`; while no route of a complete model is ready, the next topologies are waited for a little.

        Raises what `pick_entry` raises, or ApiError (503) while there is no topology.
        """
        deadline = asyncio.get_running_loop().time() + READY_SECONDS
        while True:
            changed = self._topology_changed
            if self.topology is None:
                raise no_topology(self.tracker)
            try:
                return pick_entry(self.topology, model_id, turn, avoid, self._calls(self.topology))
            except RouteNotReady:
                if not await _happens(changed, deadline):
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

    async def _pick(self, generation: Generation, tried: set[str], lost: EntryNodeLost | None) -> Node | None:
        if lost is not None and len(tried) >= MAX_ENTRY_NODES_TRIED:
            return None
        try:
            return await self.entry_node(generation.model_id, next(self._turns), tried)
        except MeshnetError:
            if lost is not None:
                return None
            raise

    async def _stream(self, node: Node, generation: Generation, deadline: float) -> AsyncGenerator[TokenEvent, None]:
        """One call to one entry node. Raises EntryNodeLost or ApiError."""
        channel = self._channels.setdefault(node.grpc_address, EntryChannel(node.grpc_address))
        channel.num_calls += 1
        timeout = max(deadline - asyncio.get_running_loop().time(), 0.001)
        call = inference_pb2_grpc.InferenceStub(channel.channel).Generate(_to_proto(generation), timeout=timeout)
        try:
            async for message in call:
                event = _from_proto(message)
                yield event
                if event.finish_reason is not None:
                    return
        except grpc.aio.AioRpcError as error:
            raise _translated(error, node) from error
        except asyncio.CancelledError:
            if rpc.is_being_cancelled():
                raise
        finally:
            call.cancel()
            channel.num_calls -= 1
        raise _entry_node_failed(node, "it ended the stream early")

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


async def _happens(event: asyncio.Event, deadline: float) -> bool:
    """Whether the event is set by then, on the loop's clock."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            return await event.wait()
    return False


def no_topology(tracker: str) -> ApiError:
    return ApiError(503, f"No topology yet: waiting for the tracker at {tracker}.", code="no_topology", retry_after=2.0)


def _rest(generation: Generation, tokens: list[int], request_id: str) -> Generation:
    """What is left of a generation after some tokens.

    Under a new id, since the lost entry node may still be writing to the old session on the hops behind it.
    """
    return replace(
        generation,
        request_id=request_id,
        prompt_token_ids=(*generation.prompt_token_ids, *tokens),
        max_new_tokens=generation.max_new_tokens - len(tokens),
    )


def _to_proto(generation: Generation) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(
        temperature=generation.temperature, top_p=generation.top_p, top_k=generation.top_k, seed=generation.seed
    )
    return inference_pb2.GenerateRequest(
        request_id=generation.request_id,
        model_id=generation.model_id,
        prompt_token_ids=generation.prompt_token_ids,
        max_new_tokens=generation.max_new_tokens,
        sampling=sampling,
        stop_token_ids=generation.stop_token_ids,
    )


def _from_proto(message: inference_pb2.GenerateEvent) -> TokenEvent:
    return TokenEvent(
        token_id=message.token_id if message.HasField("token_id") else None,
        finish_reason=_FINISH.get(message.finish_reason),
        cached_tokens=message.cached_tokens,
    )


def _translated(error: grpc.aio.AioRpcError, node: Node) -> Exception:
    """The one boundary where errors of gRPC become ours."""
    code = rpc.error_code(error)
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
