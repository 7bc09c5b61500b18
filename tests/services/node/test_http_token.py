"""A node with a token, over real sockets: both of its HTTP servers ask for it before they read a body."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import httpx
import pytest

from meshnet import wire
from meshnet.errors import NextHopFailed
from meshnet.model import LayerRange, Quantization
from meshnet.security.shared_secret import SharedSecret
from meshnet.security.token_file import replace_file
from meshnet.security.tokens import make_token
from meshnet.topology import Hop, Topology
from services.node.config import NodeConfig
from services.node.core.compression import Compression
from services.node.core.sessions import SessionTable
from services.node.core.shards import ShardTable
from services.node.core.work import ShardSpec
from services.node.fetching.ranges import make_client
from services.node.forwarding import Forwarding
from services.node.http.connection import READ_BYTES
from services.node.http_server import HttpServer
from services.node.peers import Peers
from services.node.runner import Runner
from services.node.stub import StubExecutor
from tests import models

SECONDS = 10.0
TOKEN, NEW, OTHER = make_token(), make_token(), make_token()
SESSION = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
LAYERS = LayerRange(4, 8)
WIDTH = 4
HEALTH = {"status": "ok", "registered": True, "node": "n", "kv": {}}
FRAME = {wire.SHAPE: f"1,3,{WIDTH}", wire.DTYPE: "bfloat16", wire.SESSION: SESSION, wire.POSITION: "0"}
BODY = bytes(3 * WIDTH * 2)
# Of these paths the first three are the frame server's own; all else is aiohttp's.
PATHS = [
    ("POST", "/forward"),
    ("POST", f"/returns/{'0' * 32}"),
    ("DELETE", f"/sessions/{SESSION}"),
    ("POST", "/echo"),
    ("POST", "/forward?x"),
    ("GET", "/forward"),
    ("GET", f"/models/golden/{'0' * 64}"),
    ("GET", f"/models/golden/{'0' * 64}/files/model.safetensors"),
    ("POST", f"/models/golden/{'0' * 64}/digests"),
    ("GET", "/nothing"),
    ("POST", "/health"),
    ("GET", "//health"),
    ("GET", "/health/"),
]
WRONG = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": f"Bearer {OTHER}"},
    {"Authorization": f"Bearer {TOKEN[:-1]}"},
    {"Authorization": f"Basic {TOKEN}"},
    {"Authorization": TOKEN},
    {"X-Authorization": f"Bearer {TOKEN}"},
]
RIGHT = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class Node:
    address: str
    path: Path
    sessions: SessionTable
    peers: Peers

    async def sent(self, head: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """What is answered to these bytes, and nothing more, until the server closes or the answer is whole."""
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(*self.address.rsplit(":", 1))
            try:
                writer.write(head.encode() + body)
                return await read_answer(reader)
            finally:
                writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(line.split()[1]), fields, await reader.readexactly(int(fields.get("content-length", 0)))


def head_of(method: str, path: str, num_bytes: int, **more: str) -> str:
    fields = {"Host": "n", **more, "Content-Length": str(num_bytes)}
    return f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items()) + "\r\n"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    path = tmp_path / "token"
    replace_file(path, [TOKEN])
    secret = SharedSecret(path)
    config = NodeConfig("n", "", "", "", "127.0.0.1", 0, Quantization.BFLOAT16, body_timeout=5.0, secret=secret)
    shards, sessions, runner = ShardTable(), SessionTable(), Runner(StubExecutor())
    topology = Topology()
    peers = Peers(lambda: topology, Compression.OFF, 5.0, secret=secret)
    spec = ShardSpec(models.manifest("golden", 12, WIDTH), LAYERS, Quantization.BFLOAT16, 4096)
    runner.executor.attach(runner.executor.load(spec, lambda done, total: None))
    shards.add(spec)
    sessions.ledger("golden").add_layers(LAYERS, spec.kv_tokens)
    server = HttpServer(config, Forwarding(shards, sessions, runner, peers, 0.2), lambda: dict(HEALTH))
    address = await server.start("127.0.0.1:0")
    topology = models.topology(replace(models.node("n", (4, 8)), forward_address=address), num_layers=12)
    yield Node(address, path, sessions, peers)
    await server.stop()
    await peers.close()
    runner.stop()
    sessions.check_integrity()


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_path_is_closed_to_who_does_not_show_it(node: Node, method: str, path: str) -> None:
    for wrong in WRONG:
        frame = FRAME if path.startswith(("/forward", "/returns")) else {}
        body = BODY if method == "POST" else b""
        status, fields, answer = await node.sent(head_of(method, path, len(body), **frame, **wrong), body)
        assert (status, fields["www-authenticate"]) == (401, "Bearer"), wrong
        error = json.loads(answer)["error"]
        assert (error["code"], error["node"]) == ("unauthenticated", "n")
        assert TOKEN not in error["message"]
    assert len(node.sessions) == 0


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_who_shows_it_is_served_by_both(node: Node, scheme: str) -> None:
    right = {"authorization": f"{scheme} {TOKEN}"}
    status, _, answer = await node.sent(head_of("POST", "/forward", len(BODY), **FRAME, **right), BODY)
    assert (status, answer) == (200, bytes(len(BODY)))
    chunked = "".join(f"{name}: {value}\r\n" for name, value in (FRAME | right).items())
    head = f"POST /forward HTTP/1.1\r\nHost: n\r\n{chunked}Transfer-Encoding: chunked\r\n\r\n"
    status, _, answer = await node.sent(head, b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert (status, answer) == (200, bytes(len(BODY)))
    assert (await node.sent(head_of("DELETE", f"/sessions/{SESSION}", 0, **right)))[0] == 204
    assert (await node.sent(head_of("POST", "/echo", 5, **right), b"12345"))[0] == 200
    assert (await node.sent(head_of("GET", "/nothing", 0, **right)))[0] == 404
    assert len(node.sessions) == 0


async def test_whether_it_lives_is_for_all_and_what_it_does_is_not(node: Node) -> None:
    for wrong in WRONG:
        status, _, answer = await node.sent(head_of("GET", "/health", 0, **wrong))
        assert (status, json.loads(answer)) == (200, {"status": "ok", "registered": True})
    status, _, answer = await node.sent(head_of("GET", "/health", 0, **RIGHT))
    assert (status, json.loads(answer)) == (200, HEALTH)


@pytest.mark.parametrize("path", ["/forward", "/echo"])
@pytest.mark.parametrize("num_bytes", [1, READ_BYTES, READ_BYTES + 1, 9 << 30])
async def test_a_body_is_not_waited_for(node: Node, path: str, num_bytes: int) -> None:
    """The head alone is answered, however much it announces."""
    positions = -(-num_bytes // (2 * WIDTH))
    frame = FRAME | {wire.SHAPE: f"1,{positions},{WIDTH}"}
    assert (await node.sent(head_of("POST", path, num_bytes, **frame)))[0] == 401


async def test_a_connection_without_a_body_goes_on(node: Node) -> None:
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(*node.address.rsplit(":", 1))
        for more, expected in (({}, 401), (RIGHT, 204), ({}, 401), (RIGHT, 204)):
            writer.write(head_of("DELETE", f"/sessions/{SESSION}", 0, **more).encode())
            assert (await read_answer(reader))[0] == expected
        writer.close()


async def test_what_a_stranger_pipelines_behind_a_refusal_is_not_taken_in(node: Node) -> None:
    """The body of what was refused might be taken for a request."""
    inner = head_of("DELETE", f"/sessions/{SESSION}", 0, **RIGHT)
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection(*node.address.rsplit(":", 1))
        writer.write(head_of("POST", "/forward", len(inner), **FRAME).encode() + inner.encode() * 2)
        assert (await read_answer(reader))[0] == 401
        assert await reader.read() == b""
        writer.close()


async def test_peers_show_it(node: Node) -> None:
    frame = wire.FrameHeaders(1, 3, WIDTH, (SESSION,), cached=(0,), layers=LAYERS)
    hop = Hop("n", LAYERS)
    assert await node.peers.send(hop, frame, BODY) == bytes(len(BODY))
    await node.peers.echo("n", 100)
    await node.peers.free(SESSION, (hop,))
    assert len(node.sessions) == 0


async def test_peers_without_it_are_told_why(node: Node) -> None:
    topology = models.topology(replace(models.node("n", (4, 8)), forward_address=node.address), num_layers=12)
    stranger = Peers(lambda: topology, Compression.OFF, 5.0)
    hop = Hop("n", LAYERS)
    try:
        with pytest.raises(NextHopFailed, match="401: this mesh has a token"):
            await stranger.send(hop, wire.FrameHeaders(1, 3, WIDTH, (SESSION,), cached=(0,), layers=LAYERS), BODY)
        with pytest.raises(NextHopFailed, match="401"):
            await stranger.echo("n", 0)
    finally:
        await stranger.close()


async def test_what_was_refused_to_be_freed_is_freed_when_the_token_is_right(node: Node, tmp_path: Path) -> None:
    frame, hop = wire.FrameHeaders(1, 3, WIDTH, (SESSION,), cached=(0,), layers=LAYERS), Hop("n", LAYERS)
    assert await node.peers.send(hop, frame, BODY) == bytes(len(BODY))
    replace_file(tmp_path / "other", [OTHER])
    topology = models.topology(replace(models.node("n", (4, 8)), forward_address=node.address), num_layers=12)
    behind = Peers(lambda: topology, Compression.OFF, 5.0, secret=SharedSecret(tmp_path / "other"))
    watching = asyncio.create_task(behind.watch())
    try:
        await behind.free(SESSION, (hop,))
        assert len(node.sessions) == 1
        replace_file(tmp_path / "other", [TOKEN])
        async with asyncio.timeout(SECONDS):
            while len(node.sessions):
                await asyncio.sleep(0.01)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await behind.close()


async def test_frames_in_a_row_outlive_a_rotation(node: Node) -> None:
    position = 0
    for tokens in ([TOKEN], [TOKEN, NEW], [NEW, TOKEN], [NEW]):
        replace_file(node.path, tokens)
        for _ in range(3):
            frame = wire.FrameHeaders(1, 3, WIDTH, (SESSION,), cached=(position,), layers=LAYERS)
            assert await node.peers.send(Hop("n", LAYERS), frame, BODY) == bytes(len(BODY))
            position += 3
    await node.peers.free(SESSION, (Hop("n", LAYERS),))


async def test_the_client_for_weights_shows_it_and_that_for_hubs_does_not(node: Node) -> None:
    url = f"http://{node.address}/models/golden/{'0' * 64}"

    def asked(secret: SharedSecret | None) -> httpx.Response:
        with make_client(follow_redirects=False, secret=secret) as client:
            return client.get(url)

    shown = await asyncio.to_thread(asked, SharedSecret(node.path))
    assert (shown.status_code, shown.json()["error"]["code"]) == (404, "unknown_model")
    assert (await asyncio.to_thread(asked, None)).status_code == 401


async def test_an_endless_body_of_a_stranger_is_cut_off(node: Node) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 16)

    async with asyncio.timeout(3 * SECONDS), aiohttp.ClientSession() as http:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with http.post(f"http://{node.address}/forward", headers=FRAME, data=endless()) as answer:
                assert answer.status == 401
