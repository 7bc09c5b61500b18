"""A server that does with each connection what a test says, and a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from services.node.http.client import Client

SECONDS = 10.0

Serve = Callable[["Peer", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Peer:
    """A server at `address` that does with each connection what a test says, and the bodies that it was sent."""

    address: str = ""
    bodies: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    num_ended: int = 0

    async def take(self, reader: asyncio.StreamReader) -> None:
        """One request. Raises IncompleteReadError if there is none."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        self.bodies.append(await reader.readexactly(int(length.split()[1])))


def answer(body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), more, body)


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[Peer, Client]]:
    peer = Peer()
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        tasks.add(task)
        peer.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(peer, reader, writer)
        peer.num_ended += 1
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
    host, port = server.sockets[0].getsockname()
    peer.address = f"{host}:{port}"
    client = Client()
    try:
        async with asyncio.timeout(SECONDS):
            yield peer, client
            await client.close()
            await asyncio.gather(*tasks)
    finally:
        await client.close()
        server.close()
