"""Frames to other nodes. Peers are named by id and found in the topology, never by an address from a message."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshnet import wire
from meshnet.errors import (
    BadFrame,
    CorruptFrame,
    HopFailure,
    MeshnetError,
    NextHopFailed,
    NextHopTimeout,
    Unauthenticated,
    WireVersionMismatch,
)
from meshnet.security.shared_secret import SharedSecret
from meshnet.tasks_by_key import TasksByKey
from meshnet.topology import Hop, Topology
from meshnet.wire import FrameHeaders
from services.node.core.compression import Compression, CompressionChoice
from services.node.core.hop_deadlines import HopDeadlines
from services.node.core.members import LostNode
from services.node.core.owed_frees import OwedFrees
from services.node.core.work import Buffer
from services.node.http.client import Client, Unanswered
from services.node.http.messages import FORWARD, RETURNS, SESSIONS, Answer, BadAnswer
from services.node.http_errors import error_from_answer

# What an answer may have that is not a frame.
MAX_ERROR_BYTES = 64 << 10
FREE_TIMEOUT = 5.0
# Longer than a body takes on a slow link; the entry node may be one that is not to be reached from here.
DELIVER_TIMEOUT = 10.0
ECHO_TIMEOUT = 10.0
# A hop that owes an answer for so long is asked whether it is there, and is mute if it does not say so in that time.
LATE_SECONDS = 1.0
MUTE_SECONDS = 3.0
WATCH_SECONDS = 0.5
# To compress more would keep the event loop waiting: it takes over 0.3 ms.
LARGE_BODY_BYTES = 256 << 10

log = logging.getLogger(__name__)


class _CorruptAnswer(NextHopFailed):
    """It was changed on its way back."""


@dataclass(eq=False, slots=True)
class _UnderWay:
    """A frame that waits for its answer since then, the hop that it went to, and all nodes that it depends on.
    `failure`: why it is no longer waited for."""

    hop: str
    node_ids: frozenset[str]
    since: float
    deadline: asyncio.Timeout | None = None
    failure: HopFailure | None = None

    def give_up(self, failure: HopFailure) -> None:
        if self.deadline and not self.failure:
            self.failure = failure
            self.deadline.reschedule(asyncio.get_running_loop().time())


class Peers:
    """Pooled connections to other nodes. `topology` gives the latest snapshot, `link_rate` the measured bytes a second
    of the way to a node, if they are known."""

    def __init__(
        self,
        topology: Callable[[], Topology],
        compression: Compression,
        hop_timeout: float,
        link_rate: Callable[[str], float | None] = lambda _: None,
        secret: SharedSecret | None = None,
    ) -> None:
        self._topology = topology
        self._compression = CompressionChoice(compression)
        self._link_rate = link_rate
        self._hop_timeout = hop_timeout
        self._deadlines = HopDeadlines()
        self._owed = OwedFrees()
        self._under_way: set[_UnderWay] = set()
        self._used: dict[str, None] = {}
        self._http = Client(secret)
        # A connection on which something else was asked for has left the server for frames.
        self._http_for_others = Client(secret)

    async def close(self) -> None:
        await self._http.close()
        await self._http_for_others.close()

    async def send(self, hop: Hop, frame: FrameHeaders, hidden: Buffer) -> Buffer:
        """Sends hidden states to a hop and waits for what comes back of the whole route behind it.

        `frame` describes `hidden`; its layers must be the hop's and its route the hops after it. Returns bfloat16
        `[rows, returns, hidden]`. Raises what the route answered; NextHopFailed or NextHopTimeout, with the node,
        if it did not. Ends at once when a node on the way is lost, or the hop is mute.
        """
        hops = (hop.node_id, *(behind.node_id for behind in frame.route))
        num_tokens = frame.rows * frame.positions
        # Each hop gives those behind it less time than it has itself, so that the nearest to a fault reports it.
        now = time.monotonic()
        timeout = self._deadlines.seconds(hops, len(hops), num_tokens, self._hop_timeout, now)
        self._used.pop(hop.node_id, None)
        self._used[hop.node_id] = None
        under_way = _UnderWay(hop.node_id, frozenset(hops), now)
        self._under_way.add(under_way)
        try:
            async with asyncio.timeout(timeout) as under_way.deadline:
                answer = await self._exchange(hop, frame, hidden)
        except TimeoutError as error:
            if under_way.failure:
                raise under_way.failure from error
            late = str(error) or f"no answer within {timeout:g} s"
            raise NextHopTimeout(f"node {hop.node_id}: {late}", hop.node_id) from error
        except (BadAnswer, Unanswered, OSError) as error:
            raise NextHopFailed(f"node {hop.node_id} failed: {_reason(error)}", hop.node_id) from error
        finally:
            self._under_way.discard(under_way)
        now = time.monotonic()
        self._deadlines.answered(hops, num_tokens, now - under_way.since, now)
        return answer

    async def _exchange(self, hop: Hop, frame: FrameHeaders, hidden: Buffer) -> Buffer:
        """What the route answered. A frame that was changed on its way is sent once more."""
        frame, body = await self._encoded(hop.node_id, frame, hidden)
        # Run again, a frame is cut back to its position first; but what it takes is there once.
        repeatable = frame.cached is not None and frame.prefix is None
        try:
            return await self._ask(hop, frame, body, repeatable)
        except BadFrame as error:
            log.warning("node %s refuses a frame, which is sent once more: %s", hop.node_id, error)
        except _CorruptAnswer as error:
            # What went by ticket may have come, and the session may be further.
            if frame.ticket or not repeatable:
                raise
            log.warning("a frame is sent once more: %s", error)
        try:
            return await self._ask(hop, frame, body, repeatable)
        except BadFrame as error:
            raise NextHopFailed(f"node {hop.node_id} refuses frames: {error}", hop.node_id) from error

    async def _ask(self, hop: Hop, frame: FrameHeaders, body: Buffer, repeatable: bool) -> Buffer:
        answer = await self._http.request(
            "POST",
            self._address(hop.node_id),
            FORWARD,
            wire.seal(wire.format_headers(frame), body),
            body,
            max_answer_bytes=_max_answer_bytes(frame),
            repeatable=repeatable,
        )
        return _hidden_of(answer, hop, frame)

    async def deliver(self, node_id: str, ticket: str, frame: FrameHeaders, hidden: Buffer) -> bool:
        """Brings what comes back of a frame straight to the node where it began. Returns whether it got there: if not,
        it goes the way that the frame came."""
        try:
            async with asyncio.timeout(DELIVER_TIMEOUT):
                frame, body = await self._encoded(node_id, frame, hidden)
                answer = await self._http.request(
                    "POST",
                    self._address(node_id),
                    RETURNS + ticket,
                    wire.seal(wire.format_headers(frame), body),
                    body,
                    max_answer_bytes=MAX_ERROR_BYTES,
                    repeatable=True,
                )
        except (TimeoutError, BadAnswer, Unanswered, OSError, MeshnetError):
            return False
        return answer.status == 204

    async def _encoded(self, node_id: str, frame: FrameHeaders, hidden: Buffer) -> tuple[FrameHeaders, Buffer]:
        """The frame as it goes to that node, and its body."""
        num_bytes = memoryview(hidden).nbytes
        encoding = self._compression.choose(num_bytes, self._link_rate(node_id))
        frame = frame.encoded_as(encoding)
        if encoding is None:
            return frame, hidden
        started = time.perf_counter()
        if num_bytes > LARGE_BODY_BYTES:
            body = await asyncio.to_thread(wire.encode_body, hidden, encoding)
        else:
            body = wire.encode_body(hidden, encoding)
        self._compression.observe(num_bytes, memoryview(body).nbytes, time.perf_counter() - started)
        return frame, body

    def node_lost(self, lost: LostNode) -> None:
        """Ends all that waits for an answer that would come through this node."""
        self._used.pop(lost.node_id, None)
        for under_way in self._under_way:
            if lost.node_id in under_way.node_ids:
                under_way.give_up(NextHopFailed(f"node {lost.node_id} {lost.how}", lost.node_id))

    async def watch(self) -> None:
        """For ever: asks hops that owe an answer for long whether they are there, and ends all that waits for one that
        is mute. Who works on a frame says so at once, however long that takes. Also frees what could not be freed."""
        tasks = TasksByKey[tuple[str, str]]()
        try:
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                now = time.monotonic()
                for node_id in {each.hop for each in self._under_way if each.since < now - LATE_SECONDS}:
                    tasks.start(("alive", node_id), partial(self._check_alive, node_id))
                for node_id in self._owed.due(self._topology().nodes, now):
                    tasks.start(("owed", node_id), partial(self._pay, node_id))
        finally:
            tasks.cancel()

    async def _check_alive(self, node_id: str) -> None:
        """Raises nothing."""
        failure: HopFailure
        try:
            async with asyncio.timeout(MUTE_SECONDS):
                await self.echo(node_id, 0)
            return
        except TimeoutError:
            failure = NextHopTimeout(f"node {node_id} is mute: no echo within {MUTE_SECONDS:g} s", node_id)
        except HopFailure as error:
            failure = error
        for under_way in self._under_way:
            if under_way.hop == node_id:
                under_way.give_up(failure)

    def used(self) -> tuple[str, ...]:
        """Nodes that frames were sent to, the latest first."""
        return tuple(reversed(self._used))

    async def echo(self, node_id: str, num_bytes: int) -> None:
        """Sends a body of this size for nothing, to see how long it takes. Raises NextHopFailed."""
        try:
            async with asyncio.timeout(ECHO_TIMEOUT):
                answer = await self._http_for_others.request(
                    "POST",
                    self._address(node_id),
                    "/echo",
                    {},
                    bytes(num_bytes),
                    max_answer_bytes=MAX_ERROR_BYTES,
                    repeatable=True,
                )
        except (TimeoutError, BadAnswer, Unanswered, OSError) as error:
            raise NextHopFailed(f"node {node_id} did not echo: {_reason(error)}", node_id) from error
        if answer.status != 200:
            raise NextHopFailed(f"node {node_id} echoes with status {answer.status}", node_id)

    async def free(self, session: str, route: tuple[Hop, ...], keep: int | None = None) -> None:
        """Asks every hop of a route to free a session, or to keep its first `keep` tokens; the first passes it on. A
        hop that does not answer is asked again later, without `keep`, for as long as it is in the mesh."""
        if not route:
            return
        headers = {wire.ROUTE: wire.format_route(route[1:])}
        if keep:
            headers[wire.KEEP] = str(keep)
        if not await self._delete(route[0].node_id, session, headers):
            self._owed.add(route[0].node_id, session, time.monotonic())
            # The hop is gone or mute, and those behind it may not be.
            await self.free(session, route[1:], keep)

    async def _delete(self, node_id: str, session: str, headers: dict[str, str]) -> bool:
        """Whether the node knows of it."""
        try:
            async with asyncio.timeout(FREE_TIMEOUT):
                answer = await self._http.request(
                    "DELETE",
                    self._address(node_id),
                    SESSIONS + session,
                    headers,
                    max_answer_bytes=MAX_ERROR_BYTES,
                    repeatable=True,
                )
        except (TimeoutError, BadAnswer, Unanswered, OSError, MeshnetError):
            return False
        return answer.status != Unauthenticated.status

    async def _pay(self, node_id: str) -> None:
        """Frees what could not be freed before, up to the first that cannot be now."""
        for session in self._owed.of(node_id):
            if not await self._delete(node_id, session, {}):
                return
            self._owed.settled(node_id, session)

    def _address(self, node_id: str) -> str:
        node = self._topology().nodes.get(node_id)
        if node is None:
            raise NextHopFailed(f"node {node_id} is not in the mesh", node_id)
        return node.forward_address


def _max_answer_bytes(sent: FrameHeaders) -> int:
    return max(
        wire.max_zstd_bytes(sent.rows * sent.num_returned * sent.hidden * wire.BYTES_PER_ELEMENT), MAX_ERROR_BYTES
    )


def _hidden_of(answer: Answer, hop: Hop, sent: FrameHeaders) -> Buffer:
    """What came back of a frame. Raises the error that was answered, or NextHopFailed for nonsense."""
    if answer.status != 200:
        raise error_from_answer(answer.status, answer.fields, bytes(answer.body), hop.node_id)
    try:
        wire.check_digest(answer.fields, answer.body)
        frame = wire.parse_response_headers(answer.fields)
        expected = (sent.num_returned, 0) if sent.ticket else (sent.num_returned,)
        if (frame.rows, frame.hidden) != (sent.rows, sent.hidden) or frame.positions not in expected:
            raise BadFrame(f"shape {frame.rows},{frame.positions},{frame.hidden} is not what was asked for")
        return wire.decode_body(frame, answer.body)
    except CorruptFrame as error:
        raise _CorruptAnswer(f"node {hop.node_id}: its answer is not what was sent", hop.node_id) from error
    except (BadFrame, WireVersionMismatch) as error:
        raise NextHopFailed(f"node {hop.node_id} answered nonsense: {error}", hop.node_id) from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
