"""The server over plain sockets: frames in every form that TCP may give them, and all that is not one handed over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import pytest
from aiohttp import web

from meshnet import wire
from meshnet.errors import FrameTooLarge, MeshnetError
from meshnet.wire import Buffer
from services.node.frames import Admitted, EndOfSession, Frames
from services.node.http.connection import JOINED_BYTES, MAX_HEAD_BYTES, READ_BYTES
from services.node.http.messages import Answer, format_request, parse_answer
from services.node.http.server import FrameServer
from services.node.http_errors import error_body

SECONDS = 10.0
SESSION = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
OTHER = b"GET /other HTTP/1.1\r\nHost: n\r\n\r\n"
LARGEST = 8 << 20
LARGEST_SHAPE = f"1,4,{1 << 20}"


class Echo(Frames):
    """Answers a frame with its body, once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_begun = 0

    def admit(self, target: str, fields: Mapping[str, str]) -> Admitted:
        frame = wire.parse_headers(fields)
        if frame.num_bytes > LARGEST:
            raise FrameTooLarge("too large")
        return Admitted(frame, None, frame.num_bytes, fields)

    async def answer(self, admitted: Admitted | EndOfSession, body: Buffer) -> Answer:
        assert isinstance(admitted, Admitted)
        self.num_begun += 1
        await self.gate.wait()
        return Answer(200, wire.format_headers(admitted.frame), body)

    def refusal(self, error: MeshnetError) -> Answer:
        return Answer(error.status, {}, error_body(error, "n"))


@dataclass
class Line:
    """A connection to the server, as bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        text = (await self.reader.readuntil(b"\r\n\r\n"))[:-2].decode()
        head = parse_answer(text)
        return head.status, await self.reader.readexactly(head.num_bytes)

    async def is_closed(self) -> bool:
        return not await self.reader.read(1)


class Served:
    def __init__(self, server: FrameServer, frames: Echo, port: int, lines: list[Line]) -> None:
        self.server, self.frames, self.lines = server, frames, lines
        self._port = port

    async def connect(self) -> Line:
        line = Line(*await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20))
        self.lines.append(line)
        return line


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async def other(request: web.BaseRequest) -> web.Response:
        return web.Response(text=f"{request.method} {request.path} {len(await request.read())}")

    fallback = web.Server(other)
    frames, lines = Echo(), list[Line]()
    server = FrameServer(frames, fallback, 0.3)
    port = await server.start("127.0.0.1", 0)
    async with asyncio.timeout(SECONDS):
        yield Served(server, frames, port, lines)
    frames.gate.set()
    for line in lines:
        line.writer.close()
    await server.stop()
    await fallback.shutdown(1)
    assert not server.connections


def frame(body: bytes, shape: str = "", declared: int | None = None) -> bytes:
    fields = {wire.SHAPE: shape or f"1,1,{len(body) // 2}", wire.DTYPE: "bfloat16", wire.SESSION: SESSION}
    return format_request("POST", "/forward", "n", fields, len(body) if declared is None else declared) + body


def bytes_of(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


@pytest.mark.parametrize("size", [2, READ_BYTES - 100, READ_BYTES, JOINED_BYTES + 2, LARGEST // 8, LARGEST // 4 - 2])
async def test_bodies_come_back_as_they_went(served: Served, size: int) -> None:
    line = await served.connect()
    for _ in range(3):
        line.send(frame(bytes_of(size)))
        assert await line.answer() == (200, bytes_of(size))


async def test_a_frame_may_come_byte_by_byte(served: Served) -> None:
    line = await served.connect()
    for byte in frame(b"abcd"):
        line.send(bytes([byte]))
        await line.writer.drain()
        await asyncio.sleep(0)
    assert await line.answer() == (200, b"abcd")


async def test_frames_sent_ahead_are_answered_in_order(served: Served) -> None:
    line = await served.connect()
    bodies = [bytes_of(2 * number) for number in (1, 40_000, 3, 100_000, 50)]
    line.send(b"".join(map(frame, bodies)))
    for body in bodies:
        assert await line.answer() == (200, body)


async def test_frames_sent_ahead_wait_until_the_one_before_is_answered(served: Served) -> None:
    served.frames.gate.clear()
    line = await served.connect()
    for _ in range(3):
        line.send(frame(b"ab"))
        await line.writer.drain()
    while not served.frames.num_begun:
        await asyncio.sleep(0)
    # Another connection is served meanwhile, and shows that the loop has turned.
    other = await served.connect()
    other.send(OTHER)
    assert await other.answer() == (200, b"GET /other 0")
    assert served.frames.num_begun == 1
    served.frames.gate.set()
    assert [await line.answer() for _ in range(3)] == [(200, b"ab")] * 3


async def test_many_at_once(served: Served) -> None:
    async def one(number: int) -> None:
        line = await served.connect()
        for size in (2, 70_000, 2_000 + 2 * number):
            line.send(frame(bytes_of(size)))
            assert await line.answer() == (200, bytes_of(size))

    await asyncio.gather(*map(one, range(50)))
    assert served.frames.num_begun == 150


async def test_what_is_no_frame_is_handed_over_with_its_connection(served: Served) -> None:
    line = await served.connect()
    line.send(frame(b"ab") + OTHER)
    assert await line.answer() == (200, b"ab")
    assert await line.answer() == (200, b"GET /other 0")
    # The other server takes what comes from then on.
    line.send(frame(b"abcd"))
    assert await line.answer() == (200, b"POST /forward 4")


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /forward HTTP/1.1\r\nHost: n\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
        b"POST /forward HTTP/1.1\r\nHost: n\r\nExpect: 100-continue\r\nContent-Length: 4\r\nX: \xc3\xa9\r\n\r\nabcd",
        b"POST /forward HTTP/1.0\r\nContent-Length: 4\r\nConnection: keep-alive\r\n\r\nabcd",
        b"POST /forward HTTP/1.1\r\nHost: n\r\nConnection: close\r\nContent-Length: 4\r\n\r\nabcd",
    ],
)
async def test_frames_in_other_forms_are_handed_over(served: Served, request_: bytes) -> None:
    line = await served.connect()
    line.send(request_[:30])
    await line.writer.drain()
    line.send(request_[30:])
    answered = await line.reader.readuntil(b"POST /forward 4")
    assert b" 200 OK\r\n" in answered
    assert not served.frames.num_begun


async def test_a_head_without_end_is_handed_over_and_refused(served: Served) -> None:
    line = await served.connect()
    line.send(b"POST /forward HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES + READ_BYTES))
    status = (await line.reader.readline()).split()[1]
    assert status == b"400"


async def test_a_refusal_is_heard_and_a_short_body_keeps_the_connection(served: Served) -> None:
    line = await served.connect()
    line.send(frame(b"abcdef", shape="1,1,2"))
    status, body = await line.answer()
    assert (status, json.loads(body)["error"]["code"]) == (400, "bad_frame")
    line.send(frame(b"ab"))
    assert await line.answer() == (200, b"ab")


async def test_a_refusal_comes_before_the_body(served: Served) -> None:
    line = await served.connect()
    line.send(frame(b"", shape=f"1,16,{1 << 20}", declared=4 * LARGEST))
    assert (await line.answer())[0] == 413
    # Who sends on regardless is listened to for a while, and never answered again.
    line.send(frame(b"ab"))
    assert await line.is_closed()
    assert served.frames.num_begun == 0


@pytest.mark.parametrize(("declared", "shape"), [(100, "1,1,50"), (LARGEST, LARGEST_SHAPE)])
async def test_a_body_that_stalls_is_given_up(served: Served, declared: int, shape: str) -> None:
    line = await served.connect()
    line.send(frame(b"abcd", shape=shape, declared=declared))
    status, body = await line.answer()
    assert (status, "did not arrive within 0.3 s" in json.loads(body)["error"]["message"]) == (400, True)
    assert await line.is_closed()


async def test_a_body_that_comes_too_late_is_not_run(served: Served) -> None:
    line = await served.connect()
    line.send(frame(b"ab", shape=LARGEST_SHAPE, declared=LARGEST))
    assert (await line.answer())[0] == 400
    line.send(bytes(LARGEST - 2))
    with contextlib.suppress(ConnectionError):
        assert await line.is_closed()
    assert served.frames.num_begun == 0


async def test_a_crowd_of_refusals_in_one_packet_is_answered_one_by_one(served: Served) -> None:
    line = await served.connect()
    count = 3000
    line.send(b"POST /forward HTTP/1.1\r\nContent-Length: 0\r\n\r\n" * count)
    for _ in range(count):
        assert (await line.answer())[0] == 400
    line.send(frame(b"ab"))
    assert await line.answer() == (200, b"ab")


async def test_a_client_that_does_not_read_is_given_up(served: Served) -> None:
    line = await served.connect()
    line.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    transport = line.writer.transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    line.send(frame(bytes(LARGEST), shape=LARGEST_SHAPE))
    while not served.frames.num_begun:
        await asyncio.sleep(0.01)
    while served.server.connections:
        await asyncio.sleep(0.01)


async def test_a_client_that_has_said_all_still_gets_its_answer(served: Served) -> None:
    served.frames.gate.clear()
    line = await served.connect()
    line.send(frame(b"ab"))
    line.writer.write_eof()
    while not served.frames.num_begun:
        await asyncio.sleep(0)
    served.frames.gate.set()
    assert await line.answer() == (200, b"ab")
    assert await line.is_closed()


async def test_a_client_that_goes_leaves_nothing_behind(served: Served) -> None:
    served.frames.gate.clear()
    for request in (frame(b"ab"), frame(b"ab", shape="1,1,2", declared=4), b"POST"):
        line = await served.connect()
        line.send(request)
        await line.writer.drain()
    while not served.frames.num_begun:
        await asyncio.sleep(0)
    for line in served.lines:
        line.writer.transport.abort()
    served.frames.gate.set()
    while served.server.connections:
        await asyncio.sleep(0.01)


async def test_a_server_that_stops_answers_what_it_owes(served: Served) -> None:
    served.frames.gate.clear()
    busy, idle = await served.connect(), await served.connect()
    idle.send(frame(b"ab"))
    busy.send(frame(b"abcd"))
    while served.frames.num_begun < 2:
        await asyncio.sleep(0)
    stopping = asyncio.create_task(served.server.stop())
    await asyncio.sleep(0)
    served.frames.gate.set()
    assert await busy.answer() == (200, b"abcd")
    await stopping
    assert await busy.is_closed()
    with pytest.raises(ConnectionRefusedError):
        await served.connect()


async def test_a_server_that_stops_does_not_wait_for_ever(served: Served) -> None:
    served.frames.gate.clear()
    line = await served.connect()
    line.send(frame(b"ab"))
    while not served.frames.num_begun:
        await asyncio.sleep(0)
    await served.server.stop()
    with contextlib.suppress(ConnectionError):
        assert await line.is_closed()
