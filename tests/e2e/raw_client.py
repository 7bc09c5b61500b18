"""A client of the gateway by its bare socket, that may read as slowly and leave as rudely as it likes."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h11

CLIENT_SECONDS = 120.0
# The kernel doubles it: what a client may leave unread before its server has to wait.
SLOW_BUFFER = 2048
SLOW_BYTES, SLOW_SECONDS = 700, 0.004


@dataclass(frozen=True)
class Manner:
    """How a client behaves. `leaves_after`: so many tokens were read, then it is gone; None: it stays. `resets`: it
    goes without the goodbye of TCP."""

    slow: bool = False
    leaves_after: int | None = None
    resets: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of it. `text` is None if it left."""

    text: str | None
    finish_reason: str | None = None


class RawClient:
    """One streamed completion."""

    def __init__(self, address: tuple[str, int], body: Mapping[str, Any], manner: Manner) -> None:
        self._address = address
        self._body = json.dumps({**body, "stream": True}).encode()
        self._manner = manner
        self._http = h11.Connection(h11.CLIENT)
        self._lines = b""
        self._texts: list[str] = []
        self._reason: str | None = None
        self._is_whole = False

    async def run(self) -> Outcome:
        """Raises AssertionError for anything but a whole stream, if the client does not leave before."""
        async with asyncio.timeout(CLIENT_SECONDS):
            connection = await _connected(self._address, SLOW_BUFFER if self._manner.slow else None)
            try:
                return await self._read(connection)
            finally:
                if self._manner.resets:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

    async def _read(self, connection: socket.socket) -> Outcome:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, self._request())
        leaves_after = self._manner.leaves_after
        while True:
            # Also where the rest came along with the last that it read.
            if leaves_after is not None and len(self._texts) >= leaves_after:
                return Outcome(None)
            if self._is_whole:
                return Outcome("".join(self._texts), self._reason)
            data = await loop.sock_recv(connection, SLOW_BYTES if self._manner.slow else 65536)
            assert data, f"cut off after {len(self._texts)} tokens: {self._lines!r}"
            self._received(data)
            if self._manner.slow:
                await asyncio.sleep(SLOW_SECONDS)

    def _request(self) -> bytes:
        head = h11.Request(
            method="POST",
            target="/v1/completions",
            headers=[("Host", "gateway"), ("Content-Length", str(len(self._body)))],
        )
        parts = (self._http.send(event) for event in (head, h11.Data(self._body), h11.EndOfMessage()))
        return b"".join(part or b"" for part in parts)

    def _received(self, data: bytes) -> None:
        self._http.receive_data(data)
        while not self._is_whole and (event := self._http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                assert event.status_code == 200, event
            else:
                assert isinstance(event, h11.Data), f"{event} before the end of the stream"
                self._read_lines(bytes(event.data))

    def _read_lines(self, data: bytes) -> None:
        *whole, self._lines = (self._lines + data).split(b"\n")
        for line in whole:
            if line == b"data: [DONE]":
                self._is_whole = True
            elif line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                (choice,) = event["choices"]
                self._texts += [choice["text"]] if choice["text"] else []
                self._reason = choice["finish_reason"] or self._reason


async def _connected(address: tuple[str, int], buffer: int | None) -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setblocking(False)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await asyncio.get_running_loop().sock_connect(connection, address)
    return connection
