"""Takes frames in. A connection on which anything else is asked for is handed over, as it is, to another server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import lru_cache

from meshnet.errors import BadFrame, MeshnetError, Unauthenticated
from meshnet.security.shared_secret import KEY, SharedSecret
from services.node.frames import Admitted, EndOfSession, Frames
from services.node.http.connection import READ_BYTES, Connection
from services.node.http.messages import RequestHead, format_answer, parse_request

# How long a connection may wait for its next request.
IDLE_SECONDS = 75.0
# For those who are refused to read why before the connection is closed, while they may still be sending.
LINGER_SECONDS = 2.0
# For answers under way when the server stops.
STOP_SECONDS = 1.0


class FrameServer:
    """`other` makes the protocol of a connection on which something else than frames is asked for. A body, and an
    answer, must have arrived within `body_seconds`. `secret`: to be shown with each request, if any."""

    def __init__(
        self,
        frames: Frames,
        other: Callable[[], asyncio.Protocol],
        body_seconds: float,
        secret: SharedSecret | None = None,
    ) -> None:
        self.frames = frames
        self.other = other
        self.body_seconds = body_seconds
        self.secret = secret
        self.connections: set[ServerConnection] = set()
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Begins to listen; returns the port. Raises OSError if it cannot."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: ServerConnection(self), host, port, backlog=128)
        return int(self._listener.sockets[0].getsockname()[1])

    def stop_listening(self) -> None:
        if self._listener:
            self._listener.close()

    async def stop(self) -> None:
        """Ends all connections; those that owe an answer get a moment for it."""
        self.stop_listening()
        tasks = [task for each in self.connections if (task := each.close_when_answered())]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in list(self.connections):
            connection.abort()
        # Transports close in the next turn of the loop.
        await asyncio.sleep(0)


class ServerConnection(Connection):
    def __init__(self, server: FrameServer) -> None:
        super().__init__()
        self._server = server
        self._admitted: Admitted | EndOfSession | MeshnetError | None = None
        self._is_last = False
        self._task: asyncio.Task[None] | None = None
        self._active_at = self._loop.time()
        self._idle = self._loop.call_later(IDLE_SECONDS, self._close_if_idle)
        self._patience: asyncio.TimerHandle | None = None

    def close_when_answered(self) -> asyncio.Task[None] | None:
        """The task of the answer that is owed, if there is one."""
        self._is_last = True
        if self._task is None:
            self.close()
        return self._task

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._let_go()

    def eof_received(self) -> bool:
        """Who has nothing more to say may still want the answer."""
        self._is_last = True
        return self._task is not None

    def head_received(self, text: str) -> int | None:
        request = parse_request(text)
        if request is None:
            self._hand_over()
            return None
        try:
            self._admitted = self._admit(request)
        except MeshnetError as error:
            self._admitted = error
            if request.num_bytes > (0 if isinstance(error, Unauthenticated) else READ_BYTES):
                self._refuse_and_close(error)
                return None
        return request.num_bytes

    def body_awaited(self) -> None:
        self._patience = self._loop.call_later(self._server.body_seconds, self._body_is_late)

    def head_too_long(self) -> None:
        self._hand_over()

    def message_received(self, body: memoryview) -> None:
        if self._patience:
            self._patience.cancel()
        self._task = self._loop.create_task(self._answer(body))

    def _admit(self, request: RequestHead) -> Admitted | EndOfSession:
        if self._server.secret:
            self._server.secret.check(request.fields.get(KEY))
        admitted = self._server.frames.admit(request.target, request.fields)
        if request.num_bytes > admitted.max_bytes:
            raise BadFrame(
                f"the body has {request.num_bytes} bytes, a frame of this shape at most {admitted.max_bytes}"
            )
        return admitted

    async def _answer(self, body: memoryview) -> None:
        frames, admitted = self._server.frames, self._admitted
        assert admitted, "a body comes behind its head"
        try:
            # The body of what is refused was short, and is read so that the connection can be used again.
            if isinstance(admitted, MeshnetError):
                answer = frames.refusal(admitted)
            else:
                answer = await frames.answer(admitted, body)
            if self.is_open:
                head = format_answer(answer, _date(int(time.time())), stays_open=not self._is_last)
                await self.send(head, answer.body, self._server.body_seconds)
        except TimeoutError:
            self.abort()
        finally:
            self._task = self._admitted = None
            self._active_at = self._loop.time()
        if self._is_last:
            self.close()
        else:
            self.take_next()

    def _body_is_late(self) -> None:
        late = BadFrame(f"the body did not arrive within {self._server.body_seconds:g} s")
        self._refuse_and_close(self._admitted if isinstance(self._admitted, MeshnetError) else late)

    def _refuse_and_close(self, error: MeshnetError) -> None:
        answer = self._server.frames.refusal(error)
        head = format_answer(answer, _date(int(time.time())), stays_open=False)
        if self._transport:
            self._transport.write(head + bytes(answer.body))
        self.ignore_the_rest()
        self._patience = self._loop.call_later(LINGER_SECONDS, self.close)

    def _hand_over(self) -> None:
        transport = self._transport
        assert transport
        self._let_go()
        self._transport = None
        transport.set_write_buffer_limits()
        protocol = self._server.other()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(self.take_unread())

    def _close_if_idle(self) -> None:
        is_idle = not self.is_busy
        seconds_left = self._active_at + IDLE_SECONDS - self._loop.time() if is_idle else IDLE_SECONDS
        if seconds_left <= 0:
            self.close()
        else:
            self._idle = self._loop.call_later(seconds_left, self._close_if_idle)

    def _let_go(self) -> None:
        self._server.connections.discard(self)
        self._idle.cancel()
        if self._patience:
            self._patience.cancel()


@lru_cache(maxsize=1)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)
