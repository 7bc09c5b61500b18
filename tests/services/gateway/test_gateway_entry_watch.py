"""Entry nodes that owe tokens: who answers a health check is waited for, and who does not is mute."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from meshnet import rpc
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from services.gateway import entry_watch
from services.gateway.entry_watch import EntryWatch

REQUEST = inference_pb2.GenerateRequest(request_id="r", model_id="m")


class Slow(inference_pb2_grpc.InferenceServicer):
    """Sends a token when it is told to."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateEvent]:
        await self.gate.wait()
        yield inference_pb2.GenerateEvent(token_id=7)


@pytest.fixture
async def watch(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EntryWatch]:
    for name in ("LATE_SECONDS", "WATCH_SECONDS"):
        monkeypatch.setattr(entry_watch, name, 0.05)
    made = EntryWatch()
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def silent() -> Iterator[str]:
    """An address at which connections are accepted, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_who_works_for_long_and_says_so_is_waited_for(watch: EntryWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = 0
    check = EntryWatch._check

    async def counted(self: EntryWatch, address: str, channel: grpc.aio.Channel) -> None:
        nonlocal checks
        await check(self, address, channel)
        checks += 1
        if checks == 3:
            slow.gate.set()

    monkeypatch.setattr(EntryWatch, "_check", counted)
    slow, server = Slow(), rpc.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(slow, server)
    await rpc.add_reflection_and_health(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with rpc.channel(address) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST)
        with watch.watched(address, channel, stream) as call:
            assert [event.token_id async for event in stream] == [7]
        assert (checks, call.is_mute) == (3, False)
    await server.stop(grace=None)


async def test_who_says_nothing_at_all_is_given_up(
    watch: EntryWatch, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_watch, "MUTE_SECONDS", 0.2)
    async with rpc.channel(silent) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(REQUEST)
        with watch.watched(silent, channel, stream) as call:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async with asyncio.timeout(20):
                    async for _ in stream:
                        pass
            assert call.is_mute
