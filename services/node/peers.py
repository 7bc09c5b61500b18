"""Frames to other nodes. Peers are named by id and found in the topology, never by an address from a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp

from meshnet import wire
from meshnet.errors import BadFrame, MeshnetError, NextHopFailed, NextHopTimeout, WireVersionMismatch
from meshnet.topology import Hop, Topology
from meshnet.wire import Encoding, FrameHeaders
from services.node.core.members import LostNode
from services.node.core.work import Buffer
from services.node.http_errors import error_from_answer

MAX_ERROR_BYTES = 64 << 10
CONNECT_TIMEOUT = 5.0
FREE_TIMEOUT = 5.0
# Longer than a body takes on a slow link; the entry node may be one that is not to be reached from here.
DELIVER_TIMEOUT = 10.0
ECHO_TIMEOUT = 10.0


@dataclass(eq=False, slots=True)
class _UnderWay:
    """A frame that waits for its answer, the nodes that it depends on, and the one of them that was lost."""

    node_ids: frozenset[str]
    deadline: asyncio.Timeout | None = None
    lost: LostNode | None = None


class Peers:
    """Pooled connections to other nodes. `topology` gives the latest snapshot."""

    def __init__(self, topology: Callable[[], Topology], compression: Encoding | None, hop_timeout: float) -> None:
        self._topology = topology
        self._compression = compression
        self._hop_timeout = hop_timeout
        self._under_way: set[_UnderWay] = set()
        self._used: dict[str, None] = {}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=30),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=wire.MAX_FIELD_CHARS,
            max_field_size=wire.MAX_FIELD_CHARS,
            read_bufsize=1 << 20,
        )

    async def close(self) -> None:
        await self._http.close()

    async def send(self, hop: Hop, frame: FrameHeaders, hidden: Buffer) -> Buffer:
        """Sends hidden states to a hop and waits for what comes back of the whole route behind it.

        `frame` describes `hidden`; its layers must be the hop's and its route the hops after it. Returns bfloat16
        `[rows, returns, hidden]`. Raises what the route answered; NextHopFailed or NextHopTimeout, with the node,
        if it did not. Ends at once when a node on the way is lost.
        """
        frame = replace(frame, encoding=self._compression)
        # Each hop gives those behind it less time than it has itself, so that the nearest to a fault reports it.
        timeout = self._hop_timeout * (len(frame.route) + 1)
        self._used.pop(hop.node_id, None)
        self._used[hop.node_id] = None
        under_way = _UnderWay(frozenset([hop.node_id, *(behind.node_id for behind in frame.route)]))
        self._under_way.add(under_way)
        try:
            async with (
                asyncio.timeout(timeout) as under_way.deadline,
                self._http.post(
                    self._url(hop.node_id, "/forward"),
                    data=wire.encode_body(hidden, frame.encoding),
                    headers=wire.format_headers(frame),
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
                ) as answer,
            ):
                return await self._read(hop, frame, answer)
        except TimeoutError as error:
            if lost := under_way.lost:
                raise NextHopFailed(f"node {lost.node_id} {lost.how}", lost.node_id) from error
            raise NextHopTimeout(f"node {hop.node_id} gave no answer within {timeout:g} s", hop.node_id) from error
        except (aiohttp.ClientError, OSError) as error:
            raise NextHopFailed(f"node {hop.node_id} failed: {_reason(error)}", hop.node_id) from error
        finally:
            self._under_way.discard(under_way)

    async def deliver(self, node_id: str, ticket: str, frame: FrameHeaders, hidden: Buffer) -> bool:
        """Brings what comes back of a frame straight to the node where it began. Returns whether it got there: if not,
        it goes the way that the frame came."""
        frame = replace(frame, encoding=self._compression)
        try:
            async with (
                asyncio.timeout(DELIVER_TIMEOUT),
                self._http.post(
                    self._url(node_id, f"/returns/{ticket}"),
                    data=wire.encode_body(hidden, frame.encoding),
                    headers=wire.format_headers(frame),
                    allow_redirects=False,
                ) as answer,
            ):
                return answer.status == 204
        except (TimeoutError, aiohttp.ClientError, OSError, MeshnetError):
            return False

    def node_lost(self, lost: LostNode) -> None:
        """Ends all that waits for an answer that would come through this node."""
        self._used.pop(lost.node_id, None)
        now = asyncio.get_running_loop().time()
        for under_way in self._under_way:
            if lost.node_id in under_way.node_ids and under_way.deadline and not under_way.lost:
                under_way.lost = lost
                under_way.deadline.reschedule(now)

    def used(self) -> tuple[str, ...]:
        """Nodes that frames were sent to, the latest first."""
        return tuple(reversed(self._used))

    async def echo(self, node_id: str, num_bytes: int) -> None:
        """Sends a body of this size for nothing, to see how long it takes. Raises NextHopFailed."""
        try:
            async with (
                asyncio.timeout(ECHO_TIMEOUT),
                self._http.post(self._url(node_id, "/echo"), data=bytes(num_bytes), allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    raise NextHopFailed(f"node {node_id} echoes with status {answer.status}", node_id)
                await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise NextHopFailed(f"node {node_id} did not echo: {_reason(error)}", node_id) from error

    async def free(self, session: str, route: tuple[Hop, ...], keep: int | None = None) -> None:
        """Asks every hop of a route to free a session, or to keep its first `keep` tokens; the first passes it on.
        Errors are left to the lease."""
        if not route:
            return
        try:
            headers = {wire.ROUTE: wire.format_route(route[1:])}
            if keep:
                headers[wire.KEEP] = str(keep)
            url = self._url(route[0].node_id, f"/sessions/{session}")
            async with asyncio.timeout(FREE_TIMEOUT), self._http.delete(url, headers=headers, allow_redirects=False):
                return
        except (TimeoutError, aiohttp.ClientError, OSError, MeshnetError):
            # The hop is gone or mute, and those behind it may not be.
            await self.free(session, route[1:], keep)

    async def _read(self, hop: Hop, sent: FrameHeaders, answer: aiohttp.ClientResponse) -> Buffer:
        if answer.status != 200:
            body = await answer.content.read(MAX_ERROR_BYTES)
            raise error_from_answer(answer.status, answer.headers, body, hop.node_id)
        try:
            frame = wire.parse_response_headers(answer.headers)
            returns = sent.positions if sent.returns is None else sent.returns
            expected = (returns, 0) if sent.ticket else (returns,)
            if (frame.rows, frame.hidden) != (sent.rows, sent.hidden) or frame.positions not in expected:
                raise BadFrame(f"shape {frame.rows},{frame.positions},{frame.hidden} is not what was asked for")
            if (answer.content_length or 0) > wire.max_body_bytes(frame):
                raise BadFrame(f"a body of {answer.content_length} bytes is too long")
            return wire.decode_body(frame, await answer.read())
        except (BadFrame, WireVersionMismatch) as error:
            raise NextHopFailed(f"node {hop.node_id} answered nonsense: {error}", hop.node_id) from error

    def _url(self, node_id: str, path: str) -> str:
        node = self._topology().nodes.get(node_id)
        if node is None:
            raise NextHopFailed(f"node {node_id} is not in the mesh", node_id)
        return f"http://{node.forward_address}{path}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
