"""The client against servers that do what it must survive."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.node.http.client import Client, Unanswered
from services.node.http.connection import JOINED_BYTES, MAX_HEAD_BYTES
from services.node.http.messages import Answer, BadAnswer
from tests.services.node.http.scripted import Peer, answer, serving

LARGE = 3 * 1024 * 1024 + 1
MAX_BYTES = 1 << 22


async def ask(client: Client, peer: Peer, body: bytes = b"hello", *, repeatable: bool = True) -> Answer:
    fields = {"X-Test": "1"}
    return await client.request(
        "POST", peer.address, "/forward", fields, body, max_answer_bytes=MAX_BYTES, repeatable=repeatable
    )


async def echo(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await peer.take(reader)
        writer.write(answer(peer.bodies[-1]))
        await writer.drain()


@pytest.mark.parametrize("size", [0, 1, JOINED_BYTES, JOINED_BYTES + 1, LARGE])
async def test_a_connection_is_used_again(size: int) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    async with serving(echo) as (peer, client):
        for _ in range(3):
            answered = await ask(client, peer, body)
            assert (answered.status, bytes(answered.body)) == (200, body)
        assert (peer.num_connections, len(peer.bodies)) == (1, 3)


async def test_many_at_once_have_a_connection_each_and_share_them_later() -> None:
    async with serving(echo) as (peer, client):
        for _ in range(2):
            bodies = [b"%d" % number * 30_000 for number in range(40)]
            answers = await asyncio.gather(*(ask(client, peer, body) for body in bodies))
            assert [bytes(each.body) for each in answers] == bodies
        assert peer.num_connections == 40


async def answer_once(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Then it takes the next request, and ends the connection instead of an answer."""
    await peer.take(reader)
    writer.write(answer(b"first"))
    await peer.take(reader)


async def test_a_stale_connection_is_replaced_once() -> None:
    async with serving(answer_once) as (peer, client):
        assert (await ask(client, peer, b"a")).body == b"first"
        assert (await ask(client, peer, b"b")).body == b"first"
        assert (peer.bodies, peer.num_connections) == ([b"a", b"b", b"b"], 2)


async def test_what_must_not_run_twice_is_not_sent_twice() -> None:
    async with serving(answer_once) as (peer, client):
        await ask(client, peer, b"a", repeatable=False)
        with pytest.raises(Unanswered):
            await ask(client, peer, b"b", repeatable=False)
        assert peer.bodies == [b"a", b"b"]


async def test_a_new_connection_that_ends_is_an_error_at_once() -> None:
    async def hang_up(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)

    async with serving(hang_up) as (peer, client):
        with pytest.raises(Unanswered):
            await ask(client, peer)
        assert peer.num_connections == 1


async def test_a_connection_that_the_server_has_closed_is_not_tried() -> None:
    async def once(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)
        writer.write(answer(b"bye", b"Connection: close\r\n"))
        assert not await reader.read()

    async with serving(once) as (peer, client):
        for number in (1, 2):
            assert (await ask(client, peer, repeatable=False)).body == b"bye"
            assert peer.num_connections == number


@pytest.mark.parametrize("part", [b"HTTP/1.1 20", answer(bytes(100))[:-1], answer(bytes(LARGE))[:-1]])
async def test_an_answer_that_is_cut_off_is_not_asked_for_again(part: bytes) -> None:
    async def cut(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)
        writer.write(answer(b"first"))
        await peer.take(reader)
        writer.write(part)
        await writer.drain()

    async with serving(cut) as (peer, client):
        await ask(client, peer)
        with pytest.raises(ConnectionError, match="within the answer"):
            await ask(client, peer)
        assert len(peer.bodies) == 2


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "does not begin"),
        (b"\0" * (MAX_HEAD_BYTES + JOINED_BYTES), "longer than"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "how long"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", "in pieces"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_BYTES + 1), "too long"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n", "too long"),
    ],
)
async def test_garbage_is_named_and_ends_the_connection(sent: bytes, said: str) -> None:
    async def babble(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)
        writer.write(sent)
        assert not await reader.read()

    async with serving(babble) as (peer, client):
        with pytest.raises(BadAnswer, match=said):
            await ask(client, peer)


async def test_a_body_that_stalls_ends_with_the_deadline_and_its_connection() -> None:
    ended = asyncio.Event()

    async def stall(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)
        writer.write(answer(bytes(1000))[:-1])
        with contextlib.suppress(ConnectionError):
            assert not await reader.read()
        ended.set()

    async with serving(stall) as (peer, client):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask(client, peer)
        await ended.wait()


async def test_a_server_that_does_not_read_holds_nobody_past_the_deadline() -> None:
    ended = asyncio.Event()

    async def deaf(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()

    async with serving(deaf) as (peer, client):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask(client, peer, bytes(64 << 20))
        ended.set()


async def test_a_refusal_is_heard_while_the_body_is_still_going_out() -> None:
    async def refuse(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        while await reader.read(1 << 16):
            pass

    async with serving(refuse) as (peer, client):
        for number in (1, 2):
            answered = await ask(client, peer, bytes(64 << 20))
            assert (answered.status, answered.body) == (413, b"no")
            assert peer.num_connections == number


async def test_what_comes_unasked_ends_the_connection() -> None:
    async def twice(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)
        writer.write(answer(b"one") + answer(b"forged"))
        assert not await reader.read()

    async with serving(twice) as (peer, client):
        for number in (1, 2):
            assert (await ask(client, peer)).body == b"one"
            assert peer.num_connections == number


async def test_a_request_that_is_given_up_ends_its_connection() -> None:
    async with serving(lambda peer, reader, writer: peer.take(reader)) as (peer, client):
        asking = asyncio.create_task(ask(client, peer, bytes(64 << 20)))
        while not peer.num_connections:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while not peer.num_ended:
            await asyncio.sleep(0.01)


async def test_nobody_there_is_an_os_error() -> None:
    async with serving(echo) as (peer, client):
        pass
    client = Client()
    with pytest.raises(ConnectionRefusedError):
        await ask(client, peer)
    await client.close()
