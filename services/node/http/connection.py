"""One end of an HTTP/1.1 connection: heads are collected, bodies received right where they will stay."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from typing import cast

import numpy as np

from meshnet.wire import Buffer

# What is received at once of a head, and of the small body behind it.
READ_BYTES = 64 << 10
# Longest head that is collected: a few lists of the greatest length that a field may have.
MAX_HEAD_BYTES = 256 << 10
# Up to this size, head and body are sent as one.
JOINED_BYTES = 64 << 10
# A large body is sent in such pieces. What the socket does not take of one is copied.
PIECE_BYTES = 256 << 10

_NOTHING = memoryview(b"")


class Connection(asyncio.BufferedProtocol):
    """What both ends have in common. A message is taken in at a time: `is_busy` keeps the next one waiting."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._read = bytearray(READ_BYTES)
        self._num_read = 0
        self._body = _NOTHING
        self._missing: memoryview | None = None
        self._outgoing = _NOTHING
        self._is_blocked = self._is_deaf = False
        self._sent: asyncio.Future[None] | None = None
        self.is_busy = False

    @abstractmethod
    def head_received(self, text: str) -> int | None:
        """Start line and fields. Returns the length of the body that follows; None: nothing more is to be read."""

    @abstractmethod
    def head_too_long(self) -> None:
        """More than MAX_HEAD_BYTES came, and the head has no end."""

    def body_awaited(self) -> None:
        """Not all of the body came with its head."""

    @abstractmethod
    def message_received(self, body: memoryview) -> None:
        """The head's body is here, whole."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def num_unread(self) -> int:
        """Bytes that came behind the last message."""
        return self._num_read

    def close(self) -> None:
        """After what was sent has left."""
        if self._transport:
            self._transport.close()

    def abort(self) -> None:
        """At once."""
        if self._transport:
            self._transport.abort()

    async def send(self, head: bytes, body: Buffer, seconds: float | None = None) -> None:
        """Returns when the socket has taken all, or the connection is lost. Raises TimeoutError."""
        assert self._transport
        whole = memoryview(body).cast("B") if memoryview(body).nbytes else _NOTHING
        if len(whole) <= JOINED_BYTES:
            self._transport.write(b"".join((head, whole)) if whole else head)
        else:
            self._transport.write(head)
            self._outgoing = whole
            self._send_more()
        if self._is_blocked and self.is_open:
            self._sent = self._loop.create_future()
            async with asyncio.timeout(seconds):
                await self._sent

    def stop_sending(self) -> None:
        """What is not sent yet is left out."""
        self._outgoing = _NOTHING
        if self._sent and not self._sent.done():
            self._sent.set_result(None)

    def take_next(self) -> None:
        """The last message is dealt with."""
        self.is_busy = False
        if self.is_open and self._transport:
            self._transport.resume_reading()
            if self._num_read:
                self._read_head(0)

    def ignore_the_rest(self) -> None:
        """What still comes is taken in for nothing: a connection that is closed on it would take the answer along."""
        self._is_deaf = True
        self._body, self._missing, self._num_read = _NOTHING, None, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Nothing is collected beside what the socket takes.
        self._transport.set_write_buffer_limits(high=0)
        if connected := transport.get_extra_info("socket"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_sending()

    def pause_writing(self) -> None:
        self._is_blocked = True

    def resume_writing(self) -> None:
        self._is_blocked = False
        self._send_more()
        if not self._is_blocked and self._sent and not self._sent.done():
            self._sent.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._missing is not None:
            return self._missing
        if self._is_deaf:
            return memoryview(self._read)
        if self._num_read == len(self._read):
            # A new one: the old one cannot grow while somebody looks at it.
            self._read = self._read + bytearray(len(self._read))
        return memoryview(self._read)[self._num_read :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._missing is not None:
            self._missing = self._missing[nbytes:]
            if not self._missing:
                self._end_message()
            return
        if self._is_deaf:
            return
        self._num_read += nbytes
        if not self.is_busy:
            self._read_head(self._num_read - nbytes)
        elif self._transport:
            self._transport.pause_reading()

    def take_unread(self) -> bytes:
        """What has come and belongs to no message so far."""
        unread = bytes(memoryview(self._read)[: self._num_read])
        self._num_read = 0
        return unread

    def _read_head(self, num_searched: int) -> None:
        end = self._read.find(b"\r\n\r\n", max(0, num_searched - 3), self._num_read)
        if end < 0:
            if self._num_read > MAX_HEAD_BYTES:
                self.head_too_long()
            return
        num_bytes = self.head_received(self._read[: end + 2].decode("latin-1"))
        if num_bytes is None:
            return
        self.is_busy = True
        begun = min(num_bytes, self._num_read - end - 4)
        self._body = _memory(num_bytes)
        if begun:
            self._body[:begun] = memoryview(self._read)[end + 4 : end + 4 + begun]
        self._keep_from(end + 4 + begun)
        if begun == num_bytes:
            self._end_message()
        else:
            self._missing = self._body[begun:]
            self.body_awaited()

    def _end_message(self) -> None:
        body, self._body, self._missing = self._body, _NOTHING, None
        self.message_received(body)

    def _keep_from(self, start: int) -> None:
        num_left = self._num_read - start
        if num_left:
            self._read[:num_left] = self._read[start : self._num_read]
        self._num_read = num_left

    def _send_more(self) -> None:
        while self._outgoing and not self._is_blocked and self._transport:
            piece, self._outgoing = self._outgoing[:PIECE_BYTES], self._outgoing[PIECE_BYTES:]
            self._transport.write(piece)


def _memory(num_bytes: int) -> memoryview:
    """A large body's is not cleared first: that would take a fifth of its time."""
    return np.empty(num_bytes, np.uint8).data if num_bytes > READ_BYTES else memoryview(bytearray(num_bytes))
