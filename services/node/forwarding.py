"""What happens to a frame on this node: find its place, run the layers, send it on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from meshnet.errors import BadFrame, BrokenLayers, BrokenNode, Draining, NextHopFailed, NotFinite, PositionMismatch
from meshnet.model import LayerRange
from meshnet.topology import Hop
from meshnet.wire import FrameHeaders, Prefix
from services.node.changes import Changes
from services.node.core.broken import BrokenSteps
from services.node.core.members import LostNode
from services.node.core.sessions import Piece, SessionTable
from services.node.core.shards import ShardTable
from services.node.core.work import Buffer, ForwardWork, PromptWork, Segment, SessionKey, rows_of
from services.node.peers import Peers
from services.node.returns import Returns
from services.node.runner import Runner

# What was sent by ticket comes before or with the word that it was sent.
DELIVERY_SECONDS = 5.0

log = logging.getLogger(__name__)


class Forwarding:
    """The activation plane of one node."""

    def __init__(
        self,
        shards: ShardTable,
        sessions: SessionTable,
        runner: Runner,
        peers: Peers,
        reorder_timeout: float,
        *,
        node_id: str = "",
        keeps: bool = True,
        on_broken: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`keeps`: whether KV caches of ended sessions are kept when that is asked for. `on_broken` is called with a
        model whose layers here are to be given up."""
        self.shards = shards
        self.sessions = sessions
        self.runner = runner
        self.peers = peers
        self.changes = Changes()
        self.returns = Returns()
        self.draining = False
        self._node_id = node_id
        self._keeps = keeps
        self._broken = BrokenSteps()
        self._on_broken = on_broken
        self._confirming: set[asyncio.Future[Buffer]] = set()
        self._reorder_timeout = reorder_timeout

    async def forward(self, frame: FrameHeaders, body: Buffer) -> tuple[FrameHeaders, Buffer]:
        """Runs a frame through this node and the rest of its route. `body` is decoded: raw bfloat16.

        Returns the answer frame and its bfloat16 `[rows, returns, hidden]`.
        """
        if self.draining:
            raise Draining("this node is leaving the mesh")
        model_id, layers = self.shards.resolve(frame.model, frame.layers)
        self._check_width(frame, model_id)
        pieces = _pieces(frame, model_id, layers)
        positions = await self.accept(
            pieces, first_chunk=frame.chunk_index == 0, entry=frame.entry, prefix=frame.prefix
        )
        # What is sent on must be whole; what is answered is what was asked for.
        num_returned = frame.positions if frame.route else frame.num_returned
        segments = [
            Segment(piece.key, position, piece.num_tokens, num_returned)
            for piece, position in zip(pieces, positions, strict=True)
        ]
        # A work for each row, so that one that cannot be run does not take the others with it.
        works = [
            ForwardWork(model_id, layers, (segment,), row)
            for segment, row in zip(segments, rows_of(body, frame.rows), strict=True)
        ]
        outputs = await self.run_all(works)
        hidden = outputs[0] if len(outputs) == 1 else b"".join(outputs)
        answer = FrameHeaders(
            frame.rows, frame.num_returned, frame.hidden, frame.sessions, frame.chunk_index, frame.chunk_total
        )
        if frame.route:
            self._check_still_open(pieces)
            hidden = await self.send_on(frame, frame.route, hidden, model=model_id, cached=positions)
        elif frame.ticket and frame.entry and await self.peers.deliver(frame.entry, frame.ticket, answer, hidden):
            hidden = b""
        # What the entry node has already does not go back through the hops.
        return (answer if memoryview(hidden).nbytes else replace(answer, positions=0)), hidden

    def open(self, key: SessionKey, num_tokens: int, prefix: Prefix | None = None) -> None:
        """Begins a session here with KV room for `num_tokens` in all, and with that prefix if it is here. Raises
        KvFull."""
        self.sessions.open(key, num_tokens, time.monotonic(), prefix)
        self._hand_over()

    async def accept(
        self, pieces: Sequence[Piece], *, first_chunk: bool, entry: str | None = None, prefix: Prefix | None = None
    ) -> tuple[int, ...]:
        """The positions of a frame's pieces, once the chunks before it have been handed over.

        Raises PositionMismatch if they do not come in time, or the prefix is not here; KvFull if there is no room.
        """

        def attempt(first: bool = first_chunk) -> tuple[int, ...] | None:
            try:
                return self.sessions.accept(pieces, first_chunk=first, now=time.monotonic(), entry=entry, prefix=prefix)
            finally:
                self._hand_over()

        positions = attempt() if first_chunk else await self.changes.wait_until(attempt, self._reorder_timeout)
        if positions is None:
            positions = attempt(True)
            assert positions is not None, "a first chunk waits for none before it"
        self.changes.announce()
        return positions

    async def run(self, work: ForwardWork | PromptWork) -> Buffer:
        """The work's result. Its sessions are closed here if the step fails: what they have cached is unknown."""
        return (await self.run_all([work]))[0]

    async def run_all(self, works: Sequence[ForwardWork | PromptWork]) -> list[Buffer]:
        """The results of works that belong into one step, if it has room for all. Raises the first error among them."""
        futures = self.runner.submit_all(works)
        try:
            # Those of one step are done at once, so there is one wait.
            for future in futures:
                with contextlib.suppress(Exception):
                    await future
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        failed = [(work, error) for work, future in zip(works, futures, strict=True) if (error := future.exception())]
        if failed:
            self.close([segment.key for work, _ in failed for segment in work.segments])
            work, error = failed[0]
            raise self.blamed_here(error, work.segments[0].key) if isinstance(error, BrokenLayers) else error
        return [future.result() for future in futures]

    def blamed_here(self, error: BrokenLayers, key: SessionKey) -> BrokenNode:
        """What others are told of it."""
        log.error("session %s: %s", key.session, error)
        if self._broken.add(key.model_id, key.session, time.monotonic()):
            self._on_broken(key.model_id)
        return BrokenNode(f"node {self._node_id}: {error}", self._node_id)

    async def send_on(self, frame: FrameHeaders, route: tuple[Hop, ...], hidden: Buffer, **changes: Any) -> Buffer:
        """Sends what this node made of a frame to the next hop and returns what the route answers: nothing, if that
        went to the entry node by ticket. `changes`: of the frame, beside layers and route."""
        onward = replace(frame, layers=route[0].layers, route=route[1:], **changes)
        try:
            return await self.peers.send(route[0], onward, hidden)
        except NotFinite as error:
            raise BrokenNode(f"node {self._node_id} sent on: {error}", self._node_id) from error

    async def send_and_return(self, frame: FrameHeaders, route: tuple[Hop, ...], hidden: Buffer) -> Buffer:
        """As `send_on`, for a frame that begins here. What comes back of a longer route comes straight from its end,
        while failures come from where they are, through the hops before."""
        if len(route) == 1 or not frame.returns:
            return await self.send_on(frame, route, hidden)
        with self.returns.expect(frame.rows, frame.returns, frame.hidden) as expected:
            sending = asyncio.ensure_future(self.send_on(frame, route, hidden, ticket=expected.ticket))
            try:
                await asyncio.wait([sending, expected.outcome], return_when=asyncio.FIRST_COMPLETED)
                if not expected.outcome.done():
                    if memoryview(answered := sending.result()).nbytes:
                        return answered
                    # It was delivered, and is only behind in line.
                    await asyncio.wait([expected.outcome], timeout=DELIVERY_SECONDS)
                if not expected.outcome.done():
                    raise NextHopFailed(
                        f"node {route[-1].node_id} says that it answered, and did not", route[-1].node_id
                    )
                return expected.outcome.result()
            finally:
                if expected.outcome.done() and not expected.outcome.cancelled():
                    self._confirm(sending)
                else:
                    sending.cancel()

    def _confirm(self, sending: asyncio.Future[Buffer]) -> None:
        """The hops have yet to say that they are done, which nobody needs to wait for."""
        self._confirming.add(sending)
        sending.add_done_callback(self._confirming.discard)
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self, keys: Sequence[SessionKey]) -> None:
        """Forgets sessions here, and what is kept of others, and frees their KV caches, after the work that they still
        have queued."""
        if keys:
            self.sessions.close(keys)
            self._hand_over()
            self.changes.announce()

    async def free(self, session: str, route: tuple[Hop, ...], keep: int | None = None) -> None:
        """Frees a session here and on the hops of the route behind. The whole blocks of its first `keep` tokens may
        be kept."""
        keys = self.sessions.keys_of(session)
        if keep and self._keeps:
            for key in keys:
                self.sessions.keep(key, keep, time.monotonic())
            self._hand_over()
            self.changes.announce()
        else:
            self.close(keys)
        await self.peers.free(session, route, keep)

    def give_up_kept(self, model_id: str, layers: LayerRange) -> None:
        """Nothing is kept any longer of sessions through these layers."""
        self.close(self.sessions.kept_through(model_id, layers))

    def node_lost(self, lost: LostNode) -> None:
        """Nothing more comes of that node: what waits for it ends, and the sessions that begin there are freed, as is
        what is kept for it."""
        self.peers.node_lost(lost)
        orphans = self.sessions.keys_from(lost.node_id)
        if orphans:
            log.info("%d sessions freed: node %s, where they begin, %s", len(orphans), lost.node_id, lost.how)
            self.close(orphans)

    def _hand_over(self) -> None:
        """At once: the room that a session is given may still hold what is to be freed before."""
        for work in self.sessions.take_works():
            # Whoever needs what it does hears of a failure from a work of its own.
            self.runner.submit(work).add_done_callback(lambda done: done.cancelled() or done.exception())

    def _check_still_open(self, pieces: Sequence[Piece]) -> None:
        """A session that was freed while its step ran was freed on the hops behind too: sent on, it would open there
        anew, and nobody would free it. Raises PositionMismatch."""
        for piece in pieces:
            if piece.key not in self.sessions:
                raise PositionMismatch(f"session {piece.key.session} was freed while its frame was here", 0)

    def _check_width(self, frame: FrameHeaders, model_id: str) -> None:
        wanted = self.shards.manifest(model_id).hidden_size
        if frame.hidden != wanted:
            raise BadFrame(f"X-Meshnet-Shape: hidden is {frame.hidden}, model {model_id!r} has {wanted}")


def _pieces(frame: FrameHeaders, model_id: str, layers: LayerRange) -> tuple[Piece, ...]:
    positions: Sequence[int | None] = frame.cached or (None,) * frame.rows
    return tuple(
        Piece(SessionKey(session, model_id, layers), position, frame.positions)
        for session, position in zip(frame.sessions, positions, strict=True)
    )
