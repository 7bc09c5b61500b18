"""Servers that ask for the secret and channels that show it, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from meshnet import rpc
from meshnet.security.shared_secret import SharedSecret
from meshnet.security.token_file import replace_file
from meshnet.security.tokens import make_token

TOKEN, OTHER = make_token(), make_token()
SERVICE = "test.Echo"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Echo:
    """A method of each kind, which answers with what it got. `calls` counts those that were let in."""

    calls = 0

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        self.calls += 1
        return request

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.calls += 1
        yield request
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        self.calls += 1
        return b"".join([request async for request in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.calls += 1
        async for request in requests:
            yield request

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(self, kind)) for kind in KINDS}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    replace_file(tmp_path / "token", [TOKEN])
    return tmp_path / "token"


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def address(path: Path, echo: Echo) -> AsyncIterator[str]:
    server = rpc.server(SharedSecret(path))
    echo.add_to(server)
    await rpc.add_reflection_and_health(server, SERVICE)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def called(channel: Any, kind: str, **more: Any) -> bytes:
    method = getattr(channel, kind)(f"/{SERVICE}/{kind}")
    sent = iter([b"a", b"b"]) if kind.startswith("stream") else b"ab"
    call = method(sent, timeout=10, **more)
    if kind.endswith("unary"):
        return bytes(await call)
    return b"".join([part async for part in call])


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_of_each_kind_need_the_token(
    address: str, path: Path, echo: Echo, tmp_path: Path, kind: str
) -> None:
    replace_file(tmp_path / "other", [OTHER])
    for secret, said in ((None, "shows none"), (SharedSecret(tmp_path / "other"), "not a token of this mesh")):
        async with rpc.channel(address, secret) as channel:
            # Nothing is sent: grpc.aio gives writes to a call that has ended a status of their own.
            call = getattr(channel, kind)(f"/{SERVICE}/{kind}")(*[b""] * kind.startswith("unary"), timeout=10)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert ("meshnet-error", "unauthenticated") in tuple(await call.trailing_metadata())
            details = await call.details()
        assert said in details
        assert "MESHNET_TOKEN_FILE" in details
        for token in (TOKEN, OTHER):
            assert token not in details
    assert echo.calls == 0
    async with rpc.channel(address, SharedSecret(path)) as channel:
        assert await called(channel, kind) == (b"abab" if kind == "unary_stream" else b"ab")
        # Metadata of the call's own stays.
        assert await called(channel, kind, metadata=(("x-own", "1"),)) in (b"ab", b"abab")
    assert echo.calls == 2


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", f"Bearer {OTHER}"), ("authorization", f"Bearer {TOKEN}")),
        (("authorization", TOKEN),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization", f"Bearer {TOKEN[:-1]}"),),
        (("authorization", ""),),
        (("authorization-bin", f"Bearer {TOKEN}".encode()),),
        (("x-authorization", f"Bearer {TOKEN}"),),
    ],
)
async def test_what_is_not_the_token_is_refused(address: str, echo: Echo, metadata: Any) -> None:
    async with rpc.channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await called(channel, "unary_unary", metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert echo.calls == 0


async def test_a_method_that_there_is_not_tells_nothing_to_strangers(address: str, path: Path) -> None:
    async with rpc.channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Echo/Missing")(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async with rpc.channel(address, SharedSecret(path)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Echo/Missing")(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_for_all_and_reflection_is_not(address: str, path: Path) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with rpc.channel(address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    async with rpc.channel(address, SharedSecret(path)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = await anext(aiter(stub.ServerReflectionInfo(iter([request]))))
        assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_a_request_of_a_stranger_is_not_read(address: str, echo: Echo) -> None:
    """Of the stream nothing is taken beyond what flow control lets through before the refusal."""
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1000:
            sent += 1
            yield bytes(1 << 20)

    async with rpc.channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(f"/{SERVICE}/stream_unary")(endless(), timeout=30)
    # A client of grpc.aio that is sending in the very moment may say that it could not, and not why.
    assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)
    assert sent < 100
    assert echo.calls == 0


async def test_open_streams_and_channels_outlive_a_rotation(address: str, path: Path, echo: Echo) -> None:
    async with rpc.channel(address, SharedSecret(path)) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/stream_stream")(timeout=30)
        for tokens in ([TOKEN, OTHER], [OTHER, TOKEN], [OTHER]):
            replace_file(path, tokens)
            await stream.write(b"on")
            assert await stream.read() == b"on"
            assert await called(channel, "unary_unary") == b"ab"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
    assert echo.calls == 4


async def test_without_a_secret_all_is_as_it_was(path: Path, echo: Echo) -> None:
    server = rpc.server()
    echo.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        for secret in (None, SharedSecret(path)):
            async with rpc.channel(f"127.0.0.1:{port}", secret) as channel:
                for kind in KINDS:
                    assert await called(channel, kind)
    finally:
        await server.stop(None)


async def test_blocking_channels_show_it_too(address: str, path: Path) -> None:
    def ask(secret: SharedSecret | None) -> tuple[bytes, list[bytes]]:
        with rpc.blocking_channel(address, secret) as channel:
            one = channel.unary_unary(f"/{SERVICE}/unary_unary")(b"x", timeout=10)
            return one, list(channel.stream_stream(f"/{SERVICE}/stream_stream")(iter([b"a", b"b"]), timeout=10))

    assert await asyncio.to_thread(ask, SharedSecret(path)) == (b"x", [b"a", b"b"])
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(ask, None)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
