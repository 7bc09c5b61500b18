"""What comes back of frames straight from the last hop of a route to this node, where they began."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshnet.errors import BadFrame, InvalidRequest
from meshnet.wire import FrameHeaders
from services.node.core.work import Buffer


@dataclass(frozen=True, slots=True)
class Expected:
    """A frame whose outcome may come by ticket. `outcome`: bfloat16 `[rows, returns, hidden]`."""

    ticket: str
    shape: tuple[int, int, int]
    outcome: asyncio.Future[Buffer]


class Returns:
    """Tickets that are out. Nobody can guess one, and each is good once, for as long as its frame is under way."""

    def __init__(self) -> None:
        self._expected: dict[str, Expected] = {}

    @contextmanager
    def expect(self, rows: int, positions: int, hidden: int) -> Iterator[Expected]:
        """A ticket for what comes back of a frame."""
        outcome: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        expected = Expected(secrets.token_hex(16), (rows, positions, hidden), outcome)
        self._expected[expected.ticket] = expected
        try:
            yield expected
        finally:
            self._expected.pop(expected.ticket, None)
            outcome.cancel()

    def check(self, ticket: str, frame: FrameHeaders) -> None:
        """Raises InvalidRequest for a ticket that is not out, BadFrame for another shape than it was given for."""
        expected = self._expected.get(ticket)
        if expected is None:
            raise InvalidRequest("nobody here waits for this ticket")
        if (frame.rows, frame.positions, frame.hidden) != expected.shape:
            raise BadFrame(f"shape {frame.rows},{frame.positions},{frame.hidden} is not what the ticket was given for")

    def deliver(self, ticket: str, hidden: Buffer) -> None:
        """What came. Nothing happens if it comes too late, or twice."""
        expected = self._expected.pop(ticket, None)
        if expected and not expected.outcome.done():
            expected.outcome.set_result(hidden)
