"""A TCP proxy before a server, whose behaviour a test changes while all runs: the server does not notice it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

from tests.faults.behaviour import PASS, Behaviour, Way
from tests.faults.http_pieces import Piece, Splitter

Address = tuple[str, int]

READ_BYTES = 1 << 16
CALL_SECONDS = 10.0
# An answer that nobody waits for.
DUPLICATE_SECONDS = 5.0
# SO_LINGER on, for no time: closing sends a reset.
_RESETS = struct.pack("ii", 1, 0)


class Proxy:
    """Passes bytes from clients to a server and back, and does to them what `behaviour` says. Closing it cuts all.

    Its methods may be called from any thread. `seed`: of where bits are flipped.
    """

    def __init__(self, listen: Address, server: Address, behaviour: Behaviour = PASS, seed: int = 0) -> None:
        self.server = server
        self.behaviour = PASS
        self.rng = random.Random(seed)
        self.answered_bytes = 0
        """That came from the server."""
        self.num_corrupted = self.num_duplicated = self.num_reordered = self.num_reset = 0
        self.stalled = threading.Event()
        """Set when `stalls_after` has taken effect."""
        self._listen = listen
        self._listener: asyncio.Server | None = None
        self._passages: set[_Passage] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counts = {"body": 0, "piece": 0, "request": 0}
        self._held: asyncio.Event | None = None
        self._changed: asyncio.Event
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._call(self._start(behaviour))
        except BaseException:
            self._end()
            raise

    @property
    def address(self) -> str:
        return f"{self._listen[0]}:{self._listen[1]}"

    @property
    def num_connections(self) -> int:
        return len(self._passages)

    @property
    def is_holding(self) -> bool:
        """Whether a request waits to be overtaken."""
        return self._held is not None

    def behave(self, behaviour: Behaviour) -> None:
        """From now on. Returns when it is so."""
        self._call(self._behave(behaviour))

    def reset(self) -> None:
        """Resets the connections that stand, once."""
        self._call(self._reset())

    def close(self) -> None:
        self._call(self._close())
        self._end()

    # In the thread of the loop

    async def _start(self, behaviour: Behaviour) -> None:
        self._changed = asyncio.Event()
        await self._behave(behaviour)

    async def _behave(self, behaviour: Behaviour) -> None:
        if behaviour.refuses and self._listener:
            self._listener.close()
            self._listener = None
        if not behaviour.refuses and self._listener is None:
            self._listener = await asyncio.start_server(self._accepted, *self._listen, reuse_address=True)
            self._listen = self._listener.sockets[0].getsockname()[:2]
        self.behaviour = behaviour
        for passage in self._passages:
            passage.num_answered = 0
        self._changed.set()
        self._changed = asyncio.Event()
        if behaviour.resets:
            await self._reset()

    async def _reset(self) -> None:
        for passage in tuple(self._passages):
            self.num_reset += 1
            passage.reset()

    async def _close(self) -> None:
        if self._listener:
            self._listener.close()
        for passage in tuple(self._passages):
            passage.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            await _Passage(self, reader, writer).run(self._passages)
        finally:
            self._tasks.discard(task)

    async def until_open(self, way: Way) -> None:
        """Waits while nothing passes that way."""
        while way in self.behaviour.stalls or (way is Way.TO_CLIENT and self._is_spent()):
            await self._changed.wait()

    def _is_spent(self) -> bool:
        limit = self.behaviour.stalls_after
        if limit is None or self.answered_bytes <= limit:
            return False
        self.stalled.set()
        return True

    def changed(self, way: Way, piece: Piece) -> bytes:
        """What passes in place of a piece."""
        behaviour, data = self.behaviour, piece.data
        is_whole_body = piece.start == 0 and piece.body_bytes > 0
        if behaviour.corrupts and is_whole_body and self._is_turn("body", behaviour.corrupts):
            data = self._flipped(data)
        if behaviour.corrupts_anywhere and self._is_turn("piece", behaviour.corrupts_anywhere):
            data = self._flipped(data)
        return data

    def is_duplicated(self) -> bool:
        """Whether the request that begins goes twice."""
        every = self.behaviour.duplicates
        return every is not None and self._is_turn("request", every)

    def duplicate(self, request: bytes) -> None:
        """Sends it over a connection of its own."""
        self.num_duplicated += 1
        task = self._loop.create_task(self._send_again(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hold(self) -> asyncio.Event | None:
        """Of a request that begins: what it has to wait for, if it is to be overtaken."""
        if not self.behaviour.reorders or self._held:
            return None
        self._held = asyncio.Event()
        return self._held

    def has_passed(self, held: asyncio.Event | None) -> None:
        """A request has gone to the server, itself held back or not."""
        if held and held is self._held:
            self._held = None
        elif held is None and self._held:
            self.num_reordered += 1
            self._held.set()
            self._held = None

    async def _send_again(self, request: bytes) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(*self.server)
            try:
                writer.write(request)
                async with asyncio.timeout(DUPLICATE_SECONDS):
                    await reader.read(READ_BYTES)
            finally:
                writer.transport.abort()

    def _is_turn(self, what: str, every: int) -> bool:
        self._counts[what] += 1
        return self._counts[what] % every == 0

    def _flipped(self, data: bytes) -> bytes:
        self.num_corrupted += 1
        changed = bytearray(data)
        changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    # In any thread

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_SECONDS)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS)
        self._loop.close()


@contextlib.contextmanager
def proxy(listen: Address, server: Address, behaviour: Behaviour = PASS, seed: int = 0) -> Iterator[Proxy]:
    opened = Proxy(listen, server, behaviour, seed)
    try:
        yield opened
    finally:
        opened.close()


class _Passage:
    """One client's connection, and the one to the server for it."""

    def __init__(self, owner: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._owner = owner
        self._client = reader, writer
        self._writers = [writer]
        self.num_answered = 0
        """Bytes since the behaviour changed."""

    async def run(self, passages: set[_Passage]) -> None:
        passages.add(self)
        try:
            if self._owner.behaviour.resets:
                self._owner.num_reset += 1
                self.reset()
                return
            await self._owner.until_open(Way.TO_SERVER)
            server = await asyncio.open_connection(*self._owner.server)
            self._writers.append(server[1])
            for writer in self._writers:
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.TaskGroup() as group:
                for way, (reader, _), (_, sink) in (
                    (Way.TO_SERVER, self._client, server),
                    (Way.TO_CLIENT, server, self._client),
                ):
                    line: _Line = asyncio.Queue()
                    group.create_task(self._take(way, reader, line))
                    group.create_task(self._bring(way, line, sink))
        except* OSError:
            pass
        finally:
            self.abort()
            passages.discard(self)

    def reset(self) -> None:
        for writer in self._writers:
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
        self.abort()

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _take(self, way: Way, reader: asyncio.StreamReader, line: _Line) -> None:
        """Puts into the line what is to pass, and when. The end of the stream is an empty piece."""
        loop, splitter = asyncio.get_running_loop(), Splitter()
        held: asyncio.Event | None = None
        copy: list[bytes] | None = None
        while data := await self._read(way, reader):
            due = loop.time() + self._owner.behaviour.delay
            if way is Way.TO_CLIENT:
                self._owner.answered_bytes += len(data)
            for piece in splitter.feed(data):
                is_request = way is Way.TO_SERVER
                if is_request and piece.is_head:
                    held = self._owner.hold()
                    copy = [] if self._owner.is_duplicated() else None
                passing = self._owner.changed(way, piece)
                line.put_nowait((due, passing, held, is_request and piece.is_last))
                if copy is not None:
                    copy.append(passing)
                    if piece.is_last:
                        self._owner.duplicate(b"".join(copy))
        line.put_nowait((loop.time() + self._owner.behaviour.delay, b"", None, False))

    async def _read(self, way: Way, reader: asyncio.StreamReader) -> bytes:
        # What is not taken is left to the sender to keep.
        await self._owner.until_open(way)
        return await reader.read(READ_BYTES)

    async def _bring(self, way: Way, line: _Line, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data, held, ends_request = await line.get()
            if (seconds := due - loop.time()) > 0:
                await asyncio.sleep(seconds)
            if held and not held.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._owner.behaviour.reorders):
                        await held.wait()
            await self._owner.until_open(way)
            if not data:
                if sink.can_write_eof():
                    sink.write_eof()
                return
            if way is Way.TO_CLIENT:
                self._cut(data, sink)
            sink.write(data)
            await sink.drain()
            if ends_request:
                self._owner.has_passed(held)

    def _cut(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        """Closes the connection within these bytes, and raises, if it is to end there."""
        limit = self._owner.behaviour.cuts_after
        if limit is not None and self.num_answered + len(data) > limit:
            sink.write(data[: limit - self.num_answered])
            sink.close()
            raise ConnectionAbortedError("cut")
        self.num_answered += len(data)


_Line = asyncio.Queue[tuple[float, bytes, asyncio.Event | None, bool]]
