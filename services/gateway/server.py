"""Serves the application with Hypercorn's protocol code, and with what it lacks for long streams.

- A client that stops reading is cut off: Hypercorn would wait for it for ever.
- A client that closes is noticed even if it sent bytes after its request: Hypercorn stops reading then.
- A connection that its client has closed is given up at once: Hypercorn keeps it as long as idle ones.
- A refusal reaches a client that is still sending: Hypercorn closes at once, and the client's pipe breaks.
- A stop takes seconds with any connections open: Hypercorn waits for all on Python 3.12.1 and later.

So the connections are Hypercorn's own class with four methods changed; its version is pinned for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import sys
import termios
from typing import Any

from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.utils import wrap_app
from quart import Quart

from services.gateway.config import GatewayConfig

log = logging.getLogger(__name__)

BACKLOG = 1024
LINGER_SECONDS = 2.0
# More than any client sends ahead of an answer.
MAX_BYTES_AHEAD = 1024 * 1024
MAX_UNSENT_BYTES = 64 * 1024


class Connection(TCPServer):
    """One client's connection."""

    write_timeout: float

    def __init__(self, *args: Any, write_timeout: float) -> None:
        super().__init__(*args)
        self.write_timeout = write_timeout
        self._client_gone = asyncio.Event()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._write(event.data)
        elif not isinstance(event, Updated) or not self._client_gone.is_set():
            await super().protocol_send(event)

    async def _write(self, data: bytes) -> None:
        async with self.send_lock:
            try:
                # Of writes to a connection that is lost asyncio warns.
                if not self.writer.transport.is_closing():
                    self.writer.write(data)
                await self._drain()
            except TimeoutError:
                self.writer.transport.abort()
                await self.protocol.handle(Closed())
            except (ConnectionError, RuntimeError):
                await self.protocol.handle(Closed())

    async def _drain(self) -> None:
        """Waits for room, while the client takes something, however little. Raises TimeoutError."""
        while True:
            waiting = self._waiting_bytes()
            try:
                async with asyncio.timeout(self.write_timeout):
                    return await self.writer.drain()
            except TimeoutError:
                if self._waiting_bytes() >= waiting:
                    raise

    def _waiting_bytes(self) -> int:
        """What the client has not taken yet, here and in the kernel, which asks for more only when it has lots of room:
        of a slow client one sees nothing for a long time else."""
        in_kernel = bytearray(4)
        with contextlib.suppress(OSError, ValueError):  # it is closed
            fcntl.ioctl(self.writer.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
        return self.writer.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    async def _read_data(self) -> None:
        """Reads on while bytes are handled, which waits for the running request if they are of the next one."""
        ahead = bytearray()
        handling: asyncio.Task[None] | None = None
        try:
            while data := await self._read():
                ahead += data
                if handling is None or handling.done() or len(ahead) > MAX_BYTES_AHEAD:
                    if handling is not None:
                        await handling
                    handling = asyncio.create_task(self._handle_all(ahead))
        finally:
            self._client_gone.set()
            if handling is not None:
                handling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await handling
            await self.protocol.handle(Closed())
            # It is one of the tasks that the connection waits for.
            await self.idle_task.stop()

    async def _handle_all(self, ahead: bytearray) -> None:
        try:
            while ahead:
                data = bytes(ahead)
                ahead.clear()
                await self.protocol.handle(RawData(data))
        except Exception:
            log.exception("a connection failed")
            self.writer.transport.abort()

    async def _read(self) -> bytes:
        try:
            return await self.reader.read(MAX_RECV)
        except OSError:
            return b""

    async def _close(self) -> None:
        transport = self.writer.transport
        transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(self.write_timeout):
                await self.writer.drain()
            self.writer.write_eof()
            async with asyncio.timeout(LINGER_SECONDS):
                await self._client_gone.wait()
        self.abort()
        await super()._close()

    async def _initiate_server_close(self) -> None:
        await self.protocol.handle(Closed())
        self.abort()

    def abort(self) -> None:
        """Closes without waiting for a client that does not read."""
        transport = self.writer.transport
        if transport.get_write_buffer_size():
            transport.abort()
        else:
            transport.close()


async def serve(app: Quart, listener: socket.socket, config: GatewayConfig, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then for at most `config.shutdown_timeout` more, in seconds."""
    hypercorn_config = protocol_config(config)
    wrapped = wrap_app(app, hypercorn_config.wsgi_max_body_size, "asgi")
    context = WorkerContext(None)
    loop = asyncio.get_running_loop()
    open_connections: dict[asyncio.Task[Any], Connection] = {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        _set_options(writer.get_extra_info("socket"))
        connection = Connection(
            wrapped, loop, hypercorn_config, context, {}, reader, writer, write_timeout=config.write_timeout
        )
        open_connections[task] = connection
        try:
            await connection
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            del open_connections[task]

    await app.startup()
    server = await asyncio.start_server(connected, sock=listener, backlog=BACKLOG)
    await stop.wait()
    server.close()
    await context.terminated.set()
    await _end(open_connections, config.shutdown_timeout)
    await app.shutdown()


def _set_options(connection: socket.socket) -> None:
    # asyncio leaves it off on sockets that were accepted by a listener without an explicit protocol number, and then
    # every answer takes tens of milliseconds.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The system would hold megabytes for a slow client, and tell of room only when a third of them is gone: too late to
    # tell it from one that does not read.
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


async def _end(open_connections: dict[asyncio.Task[Any], Connection], grace: float) -> None:
    if open_connections:
        await asyncio.wait(tuple(open_connections), timeout=grace)
    # As if their clients had gone: that cancels what runs for them, which cancelling these tasks would not.
    for connection in open_connections.values():
        connection.writer.transport.abort()
    if open_connections:
        await asyncio.wait(tuple(open_connections), timeout=grace)


def protocol_config(config: GatewayConfig) -> Config:
    hypercorn_config = Config()
    hypercorn_config.keep_alive_timeout = config.keep_alive_timeout
    # Hypercorn closes a connection after a thousand requests, under the client that is about to send the next.
    hypercorn_config.keep_alive_max_requests = 2**62
    hypercorn_config.include_server_header = False
    hypercorn_config.errorlog = logging.getLogger("meshnet.gateway.http")
    return hypercorn_config
