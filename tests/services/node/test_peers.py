"""Frames to nodes that do what they must not: which errors blame whom, and what is sent again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from meshnet import wire
from meshnet.errors import KvFull, NextHopFailed, NextHopTimeout
from meshnet.model import LayerRange
from meshnet.topology import Hop
from meshnet.wire import Encoding, FrameHeaders
from services.node import peers as peers_module
from services.node.core import owed_frees
from services.node.core.compression import Compression
from services.node.core.members import LostNode
from services.node.peers import Peers
from tests import models
from tests.services.node.http.scripted import Peer, Serve, answer, serving

SESSION = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
OTHER = SESSION.replace("3", "4")
HOP = Hop("b", LayerRange(0, 4))
FRAME = FrameHeaders(1, 1, 4, (SESSION,), cached=(7,), layers=HOP.layers, returns=1)
BODY = b"abcdefgh"


def good(body: bytes = BODY, frame: FrameHeaders = FRAME) -> bytes:
    fields = wire.format_headers(replace(frame, cached=None, layers=None))
    return answer(body, b"".join(f"{name}: {value}\r\n".encode() for name, value in fields.items()))


@contextlib.asynccontextmanager
async def sending(
    serve: Serve,
    hop_timeout: float = 5.0,
    compression: Compression = Compression.OFF,
    link_rate: float | None = None,
) -> AsyncIterator[tuple[Peer, Peers]]:
    async with serving(serve) as (peer, _):
        node = replace(models.node("b", (0, 4)), forward_address=peer.address)
        topology = models.topology(node, num_layers=4)
        peers = Peers(lambda: topology, compression, hop_timeout, lambda _: link_rate)
        try:
            yield peer, peers
        finally:
            await peers.close()


async def good_once(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Then it takes the next frame, and ends the connection instead of an answer."""
    await peer.take(reader)
    writer.write(good())
    await peer.take(reader)


async def test_a_frame_that_says_its_position_outlives_a_stale_connection() -> None:
    async with sending(good_once) as (peer, peers):
        for _ in range(2):
            assert await peers.send(HOP, FRAME, BODY) == BODY
        assert (peer.num_connections, len(peer.bodies)) == (2, 3)


@pytest.mark.parametrize(
    "more", [{"cached": None}, {"cached": (128,), "prefix": wire.Prefix(OTHER, 128, take=True)}], ids=["new", "taken"]
)
async def test_a_frame_that_may_not_run_twice_is_sent_once(more: dict[str, object]) -> None:
    frame = replace(FRAME, **more)  # type: ignore[arg-type]
    async with sending(good_once) as (peer, peers):
        assert await peers.send(HOP, frame, BODY) == BODY
        with pytest.raises(NextHopFailed) as failed:
            await peers.send(HOP, frame, BODY)
        assert (failed.value.node_id, len(peer.bodies)) == ("b", 2)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"", "without an answer"),
        (good()[:-1], "within the answer"),
        (b"nonsense\r\n\r\n", "does not begin"),
        (answer(BODY), "answered nonsense"),
        (good(BODY[1:]), "answered nonsense"),
        (good(BODY * 2, replace(FRAME, positions=2)), "answered nonsense"),
        (good()[:-8].replace(b"Length: 8", b"Length: 999999999"), "too long"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 7\r\n\r\n<html/>", "HTTP 502"),
    ],
)
async def test_whoever_answers_nonsense_is_blamed(sent: bytes, said: str) -> None:
    async def babble(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)
        writer.write(sent)
        writer.write_eof()

    async with sending(babble) as (_, peers):
        with pytest.raises(NextHopFailed, match=said) as failed:
            await peers.send(HOP, FRAME, BODY)
        assert failed.value.node_id == "b"


async def test_an_error_that_is_answered_is_raised() -> None:
    async def full(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)
        writer.write(answer(b'{"error": {"code": "kv_full", "message": "no room"}}', b"Retry-After: 7\r\n").replace(
            b"200 OK", b"429 Too Many Requests"
        ))  # fmt: skip

    async with sending(full) as (_, peers):
        with pytest.raises(KvFull) as busy:
            await peers.send(HOP, FRAME, BODY)
        assert busy.value.retry_after == 7


async def mute(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await peer.take(reader)
    assert not await reader.read()


async def test_a_node_that_is_mute_is_named_in_time() -> None:
    async with sending(mute, hop_timeout=0.1) as (_, peers):
        with pytest.raises(NextHopTimeout, match=r"no answer within 0\.1 s") as late:
            await peers.send(HOP, FRAME, BODY)
        assert late.value.node_id == "b"


async def test_a_hop_that_does_not_even_echo_is_given_up_long_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "LATE_SECONDS", 0.1)
    monkeypatch.setattr(peers_module, "MUTE_SECONDS", 0.1)
    async with sending(mute, hop_timeout=1000.0) as (_, peers), watching(peers):
        with pytest.raises(NextHopTimeout, match="node b is mute") as late:
            await peers.send(HOP, FRAME, BODY)
        assert late.value.node_id == "b"


async def test_a_hop_that_works_for_long_and_echoes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "LATE_SECONDS", 0.05)
    echoes = asyncio.Event()

    async def slow(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/echo" in head:
            if peer.num_connections > 3:
                echoes.set()
            writer.write(answer(b""))
        else:
            await reader.readexactly(len(BODY))
            await echoes.wait()
            writer.write(good())

    async with sending(slow, hop_timeout=1000.0) as (_, peers), watching(peers):
        assert await peers.send(HOP, FRAME, BODY) == BODY


@contextlib.asynccontextmanager
async def watching(peers: Peers) -> AsyncIterator[None]:
    watch = asyncio.create_task(peers.watch())
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def test_a_session_that_could_not_be_freed_is_freed_when_the_node_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owed_frees, "RETRY_SECONDS", 0.1)
    freed = asyncio.Event()

    async def breaks_off_twice(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if peer.num_connections > 2:
            assert head.startswith(f"DELETE /sessions/{SESSION} ".encode())
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            freed.set()

    async with sending(breaks_off_twice) as (_, peers), watching(peers):
        await peers.free(SESSION, (HOP,), keep=128)
        async with asyncio.timeout(20):
            await freed.wait()


def refused(code: bytes = b"corrupt_frame") -> bytes:
    said = answer(b'{"error": {"code": "%s", "message": "another digest"}}' % code)
    return said.replace(b"200 OK", b"400 Bad Request")


def damaged() -> bytes:
    fields = wire.seal(wire.format_headers(replace(FRAME, cached=None, layers=None)), BODY)
    return answer(b"abcdefgi", b"".join(f"{name}: {value}\r\n".encode() for name, value in fields.items()))


@pytest.mark.parametrize("first", [refused(), refused(b"bad_frame"), damaged()], ids=["there", "its head", "back"])
async def test_what_was_changed_on_its_way_is_sent_once_more(first: bytes) -> None:
    async def serve(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await peer.take(reader)
            writer.write(first if len(peer.bodies) == 1 else good())

    async with sending(serve) as (peer, peers):
        assert await peers.send(HOP, FRAME, BODY) == BODY
        assert len(peer.bodies) == 2


@pytest.mark.parametrize(
    ("always", "frame", "times"),
    [
        (refused(), FRAME, 2),
        (damaged(), FRAME, 2),
        (damaged(), replace(FRAME, ticket="0" * 32), 1),
        (damaged(), replace(FRAME, cached=None), 1),
    ],
    ids=["refused", "damaged", "what went by ticket", "what may not run twice"],
)
async def test_a_hop_behind_which_all_is_changed_has_failed(always: bytes, frame: FrameHeaders, times: int) -> None:
    async def serve(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await peer.take(reader)
            writer.write(always)

    async with sending(serve) as (peer, peers):
        with pytest.raises(NextHopFailed) as failed:
            await peers.send(HOP, frame, BODY)
        assert (failed.value.node_id, len(peer.bodies)) == ("b", times)


async def test_what_waits_for_a_lost_node_ends_at_once() -> None:
    async with sending(mute) as (peer, peers):
        waiting = asyncio.create_task(peers.send(HOP, FRAME, BODY))
        while not peer.bodies:
            await asyncio.sleep(0.01)
        peers.node_lost(LostNode("b", "left"))
        with pytest.raises(NextHopFailed, match="node b left"):
            await waiting


async def test_connections_of_frames_are_for_frames() -> None:
    """What else is asked for over one would move it to the slower server."""
    asked: list[set[bytes]] = []

    async def listen(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: set[bytes] = set()
        asked.append(mine)
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"Content-Length: ")[2].split()[0])
            await reader.readexactly(length)
            mine.add(head.split(b"/")[1].split()[0])
            writer.write(good())

    async with sending(listen) as (_, peers):
        for _ in range(2):
            await peers.send(HOP, FRAME, BODY)
            await peers.deliver("b", "0" * 32, FRAME, BODY)
            await peers.echo("b", 100)
            await peers.free(SESSION, (HOP,))
    assert asked == [{b"forward", b"returns", b"sessions"}, {b"echo"}]


@pytest.mark.parametrize(("link_rate", "is_smaller"), [(1e6, True), (1e9, False), (None, False)])
@pytest.mark.parametrize("num_tokens", [64, 1024])
async def test_slow_links_get_smaller_bodies(link_rate: float | None, is_smaller: bool, num_tokens: int) -> None:
    frame = replace(FRAME, positions=num_tokens, hidden=512)
    # Half of it is zeros.
    body = (random.Random(0).randbytes(512) + bytes(512)) * num_tokens

    async def serve(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.take(reader)
        writer.write(good(bytes(1024), replace(FRAME, hidden=512)))

    async with sending(serve, 5.0, Compression.AUTO, link_rate) as (peer, peers):
        assert await peers.send(HOP, frame, body) == bytes(1024)
        (sent,) = peer.bodies
        encoding = Encoding.ZSTD if is_smaller else None
        assert (len(sent) < len(body)) == is_smaller
        assert bytes(wire.decode_body(replace(frame, encoding=encoding), sent)) == body
