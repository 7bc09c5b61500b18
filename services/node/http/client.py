"""Requests to other nodes over connections that stay open."""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict

from aiohappyeyeballs import start_connection

from meshnet.addresses import split_address
from meshnet.security.shared_secret import HEADER, SharedSecret
from meshnet.wire import Buffer
from services.node.http.connection import MAX_HEAD_BYTES, Connection
from services.node.http.messages import Answer, AnswerHead, BadAnswer, format_request, parse_answer

CONNECT_SECONDS = 5.0
# Less than servers let a connection idle (see http_server), so that it is seldom the server that closes one.
IDLE_SECONDS = 60.0
# Before the other address of a name is tried as well.
HAPPY_EYEBALLS_SECONDS = 0.25


class Unanswered(Exception):
    """The connection ended before anything of the answer came."""


class Client:
    """A pool of connections by address. One request at a time goes over each. `secret`: to be shown in each, if any."""

    def __init__(self, secret: SharedSecret | None = None) -> None:
        self._secret = secret
        self._idle: defaultdict[str, list[ClientConnection]] = defaultdict(list)
        self._open: set[ClientConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def request(
        self,
        method: str,
        address: str,
        target: str,
        fields: dict[str, str],
        body: Buffer = b"",
        *,
        max_answer_bytes: int,
        repeatable: bool,
    ) -> Answer:
        """The answer, whatever its status. `repeatable`: twice does no more than once.

        The caller limits the time; a request that is given up ends its connection. Raises BadAnswer, Unanswered,
        OSError, and TimeoutError if there is no connection in time.
        """
        if self._secret:
            fields = {HEADER: self._secret.authorization, **fields}
        head = format_request(method, target, address, fields, memoryview(body).nbytes)
        if connection := self._take_idle(address):
            try:
                return await self._exchange(address, connection, head, body, max_answer_bytes)
            except Unanswered:
                # The server may have closed it before the request came, or broken down over it: nobody can tell.
                if not repeatable:
                    raise
        return await self._exchange(address, await self._connect(address), head, body, max_answer_bytes)

    async def close(self) -> None:
        if self._sweep:
            self._sweep.cancel()
        closed = list(self._open)
        for connection in closed:
            connection.abort()
        await asyncio.gather(*(connection.ended for connection in closed))

    async def _exchange(
        self, address: str, connection: ClientConnection, head: bytes, body: Buffer, max_answer_bytes: int
    ) -> Answer:
        answer = await connection.exchange(head, body, max_answer_bytes)
        if connection.can_go_on:
            self._keep(address, connection)
        else:
            connection.close()
        return answer

    async def _connect(self, address: str) -> ClientConnection:
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
                # Not the event loop's own: cancelled at the wrong moment, that leaves a connection open.
                connected = await start_connection(found, happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS, interleave=1)
                _, connection = await loop.create_connection(ClientConnection, sock=connected)
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {CONNECT_SECONDS:g} s") from error
        self._open.add(connection)
        connection.ended.add_done_callback(lambda _: self._open.discard(connection))
        return connection

    def _take_idle(self, address: str) -> ClientConnection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.can_go_on:
                return connection
            connection.close()
        return None

    def _keep(self, address: str, connection: ClientConnection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle[address].append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_SECONDS / 2, self._close_idle)

    def _close_idle(self) -> None:
        oldest = asyncio.get_running_loop().time() - IDLE_SECONDS / 2
        for address, connections in list(self._idle.items()):
            kept = [each for each in connections if each.can_go_on and each.idle_since > oldest]
            for connection in set(connections).difference(kept):
                connection.close()
            if kept:
                self._idle[address] = kept
            else:
                del self._idle[address]
        self._sweep = asyncio.get_running_loop().call_later(IDLE_SECONDS / 2, self._close_idle) if self._idle else None


class ClientConnection(Connection):
    """`ended` is done when the connection is."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.idle_since = 0.0
        self._answer: asyncio.Future[Answer] | None = None
        self._max_bytes = 0
        self._head: AnswerHead | None = None
        self._is_spent = False

    @property
    def can_go_on(self) -> bool:
        """Whether another request may go this way."""
        return self.is_open and not self._is_spent and not self.num_unread

    async def exchange(self, head: bytes, body: Buffer, max_answer_bytes: int) -> Answer:
        """Raises BadAnswer, Unanswered or OSError. Whatever it raises, the connection is at an end."""
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answer = answer
        self._head, self._max_bytes = None, max_answer_bytes
        try:
            await self.send(head, body)
            return await answer
        except BaseException:
            self.abort()
            if answer.done() and not answer.cancelled():
                # Nobody else asks.
                answer.exception()
            raise
        finally:
            self._answer = None

    def head_received(self, text: str) -> int | None:
        if self._answer is None or self._answer.done():
            self.abort()
            return None
        try:
            self._head = parse_answer(text)
            if self._head.num_bytes > self._max_bytes:
                raise BadAnswer(f"an answer of {self._head.num_bytes} bytes is too long: {self._max_bytes} at most")
        except BadAnswer as error:
            self._fail(error)
            return None
        if self._outgoing or self._is_blocked or not self._head.stays_open:
            # Who answers before the request is whole does not want the rest.
            self._is_spent = True
            self.stop_sending()
        return self._head.num_bytes

    def head_too_long(self) -> None:
        self._fail(BadAnswer(f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes"))

    def message_received(self, body: memoryview) -> None:
        self.is_busy = False
        assert self._head, "a body comes behind its head"
        if self._answer and not self._answer.done():
            self._answer.set_result(Answer(self._head.status, self._head.fields, body))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._head or self.num_unread:
            self._fail(ConnectionError(f"the connection ended within the answer{f': {exc}' if exc else ''}"))
        else:
            self._fail(Unanswered(f"the connection ended without an answer{f': {exc}' if exc else ''}"))
        self.ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.stop_sending()
        if self._answer and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
