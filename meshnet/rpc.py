"""How every gRPC server and channel of the mesh is set up, and how errors cross it.

Errors: a status code for generic clients, and trailing metadata `meshnet-error` with our own code. Both sides map
through the one table here.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from meshnet.errors import (
    Busy,
    Draining,
    HopFailure,
    InvalidRequest,
    KvFull,
    LoadFailed,
    MeshnetError,
    MissingLayers,
    NextHopTimeout,
    Unauthenticated,
    UnknownModel,
    UnknownVocabulary,
    Unregistered,
)
from meshnet.security.grpc_guard import TokenGuard
from meshnet.security.grpc_signing import SignedChannel
from meshnet.security.shared_secret import SharedSecret

M = TypeVar("M")
T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 20_000

ERROR_KEY = "meshnet-error"
RETRY_AFTER_KEY = "meshnet-retry-after"
NODE_KEY = "meshnet-failed-node"

# so_reuseport off: a second server on the port must fail instead of sharing it silently.
# The ping settings of both sides belong together: a server that does not allow pings at this rate kills live calls.
SERVER_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
)
CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A peer that restarts is back in seconds, not after the default two minutes of backoff.
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    # A new channel is a new connection, and not one of another channel, which may be what is wrong.
    ("grpc.use_local_subchannel_pool", 1),
)

_STATUS: dict[type[MeshnetError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    UnknownModel: grpc.StatusCode.NOT_FOUND,
    UnknownVocabulary: grpc.StatusCode.FAILED_PRECONDITION,
    Unregistered: grpc.StatusCode.NOT_FOUND,
    KvFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    MissingLayers: grpc.StatusCode.UNAVAILABLE,
    NextHopTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    HopFailure: grpc.StatusCode.UNAVAILABLE,
    LoadFailed: grpc.StatusCode.FAILED_PRECONDITION,
}


def channel(address: str, secret: SharedSecret | None = None) -> grpc.aio.Channel:
    """A channel to a member of the mesh. Connects when first used."""
    opened = grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))
    return SignedChannel(opened, secret) if secret else opened


def blocking_channel(address: str, secret: SharedSecret | None = None) -> grpc.Channel:
    """The same, for commands."""
    opened = grpc.insecure_channel(address, options=list(CHANNEL_OPTIONS))
    return SignedChannel(opened, secret) if secret else opened


def server(secret: SharedSecret | None = None) -> grpc.aio.Server:
    """With a secret, it answers nobody who does not show it, but health checks."""
    guards = [TokenGuard(secret, abort)] if secret else None
    return grpc.aio.server(options=list(SERVER_OPTIONS), interceptors=guards)


async def add_reflection_and_health(server: grpc.aio.Server, *service_names: str) -> health.aio.HealthServicer:
    """Makes the services listable with grpcurl and reports them as serving."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    for name in ("", *service_names):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    return servicer


def status_of(error: MeshnetError) -> grpc.StatusCode:
    for kind in type(error).__mro__:
        if kind in _STATUS:
            return _STATUS[kind]
    return grpc.StatusCode.INTERNAL


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: MeshnetError) -> None:
    """Ends the call with the error's status, message and codes. Always raises."""
    trailers = [(ERROR_KEY, error.code)]
    if isinstance(error, Busy):
        trailers.append((RETRY_AFTER_KEY, f"{error.retry_after:g}"))
    if isinstance(error, HopFailure):
        trailers.append((NODE_KEY, error.node_id))
    await context.abort(status_of(error), str(error), tuple(trailers))


Unary = Callable[[Any, Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any, Any], AsyncIterator[Any]]


def translates_errors(method: Unary) -> Unary:
    """For unary servicer methods: a MeshnetError becomes a gRPC status."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except MeshnetError as error:
            await abort(context, error)

    return wrapper


def translates_stream_errors(method: Stream) -> Stream:
    """For streaming servicer methods: a MeshnetError becomes a gRPC status."""

    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for item in method(self, request, context):
                yield item
        except MeshnetError as error:
            await abort(context, error)

    return wrapper


def is_being_cancelled() -> bool:
    """Whether the running task is being cancelled.

    grpc.aio also raises CancelledError when a server ends a call with the status CANCELLED, or a channel is closed
    under it.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Garbled(MeshnetError):
    """What came over gRPC is no message."""

    code = "garbled"
    status = 502


def decoded(message: M | None, make: Callable[[M], T]) -> T:
    """What `make` makes of a message that a call has brought. Raises Garbled if that was changed on its way: grpc.aio
    makes None of what is no message, and what is one may make no sense."""
    if message is None:
        raise Garbled("what came is no message of this protocol")
    try:
        return make(message)
    except (ValueError, LookupError, TypeError) as error:
        raise Garbled(f"what came means nothing: {error}") from error


def error_code(error: grpc.aio.AioRpcError) -> str | None:
    """Our code in a failed call's trailing metadata, if a member of the mesh sent one."""
    return trailer(error, ERROR_KEY)


def trailer(error: grpc.aio.AioRpcError, key: str) -> str | None:
    for name, value in error.trailing_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None
