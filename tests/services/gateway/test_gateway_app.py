"""Limits of the application that take more clients than a test should start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator

import pytest

from services.gateway.app import GatewayApp, create_app
from services.gateway.config import GatewayConfig
from services.gateway.mesh_client import MeshClient
from services.gateway.server import protocol_config, serve
from services.gateway.service import Service
from services.gateway.tokenizers_store import TokenizerStore


@pytest.fixture
async def full() -> AsyncIterator[GatewayApp]:
    """An app that may serve no request."""
    config = GatewayConfig("127.0.0.1:1", "127.0.0.1", 0, {}, max_requests_in_flight=0)
    tokenizers = TokenizerStore({})
    yield create_app(Service(MeshClient(config.tracker, 1), tokenizers), config, 0)
    tokenizers.close()


async def test_more_requests_than_allowed_are_told_to_come_again(full: GatewayApp) -> None:
    response = await full.test_client().post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "1"
    assert (await response.get_json())["error"]["type"] == "rate_limit_error"


async def test_a_full_gateway_still_tells_its_health(full: GatewayApp) -> None:
    response = await full.test_client().get("/health")
    assert response.status_code == 503
    assert (await response.get_json())["error"]["code"] == "no_topology"


async def test_a_fault_in_a_route_is_a_500_as_json(full: GatewayApp) -> None:
    @full.get("/fault")
    async def fault() -> str:
        raise RuntimeError("a secret")

    response = await full.test_client().get("/fault")
    assert response.status_code == 500
    error = (await response.get_json())["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal")
    assert "secret" not in error["message"]


def test_idle_connections_outlive_the_pools_of_clients() -> None:
    """The pools of httpx keep them for 5 seconds, those of aiohttp for 15, of Go for 90."""
    config = protocol_config(GatewayConfig("127.0.0.1:1", "127.0.0.1", 0, {}))
    assert config.keep_alive_timeout > 90


@contextlib.asynccontextmanager
async def served(**times: float) -> AsyncIterator[tuple[str, int]]:
    """The address of a gateway in this process, without a mesh."""
    config = GatewayConfig("127.0.0.1:1", "127.0.0.1", 0, {}, **times)  # type: ignore[arg-type]
    tokenizers, stop = TokenizerStore({}), asyncio.Event()
    app = create_app(Service(MeshClient(config.tracker, 1), tokenizers), config, 0)
    listener = socket.create_server((config.host, 0))
    serving = asyncio.create_task(serve(app, listener, config, stop))
    try:
        yield listener.getsockname()
    finally:
        stop.set()
        await serving
        tokenizers.close()


async def exchanged(address: tuple[str, int], sent: bytes) -> bytes:
    """What a client that sends this, and then only reads, is told until it is hung up on."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        try:
            return await reader.read()
        finally:
            writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
async def test_a_body_that_does_not_come_is_a_408(path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode()
    async with served(body_timeout=0.3) as address:
        for begun in (head, head + b'{"model":'):
            status, _, rest = (await exchanged(address, begun)).partition(b"\r\n")
            assert status.startswith(b"HTTP/1.1 408")
            error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")


async def test_an_idle_connection_is_closed_when_its_time_is_over_and_no_busy_one() -> None:
    """As long as it is used, it may be older than that."""
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(keep_alive_timeout=1.0) as address, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*address)
        opened, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        while loop.time() < opened + 1.5:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            (length,) = re.findall(rb"content-length: (\d+)", head.lower())
            assert b"no_topology" in await reader.readexactly(int(length))
        assert await reader.read() == b""
        writer.close()
