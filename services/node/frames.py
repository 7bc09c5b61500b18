"""What a node does with the frames that it is sent, whichever server they come through."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from meshnet import wire
from meshnet.errors import FrameTooLarge, MeshnetError
from meshnet.topology import Hop
from meshnet.wire import Buffer, FrameHeaders
from services.node.forwarding import Forwarding
from services.node.http.messages import RETURNS, SESSIONS, Answer
from services.node.http_errors import error_body, error_headers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A frame whose headers are in order. `max_bytes`: of its body, as sent. `ticket`: it is what came of a frame that
    began here. `fields`: as they came, by lower-case name."""

    frame: FrameHeaders
    ticket: str | None
    max_bytes: int
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EndOfSession:
    """A session to be freed here and on the hops behind. The whole blocks of its first `keep` tokens may be kept."""

    session: str
    route: tuple[Hop, ...]
    keep: int | None
    max_bytes: int = 0


class Frames:
    """POST /forward and /returns/{ticket}, and DELETE /sessions/{uuid}, which must not fall behind them: the room that
    it frees may be what the next frame needs."""

    def __init__(self, node_id: str, forwarding: Forwarding, max_frame_bytes: int) -> None:
        self._node_id = node_id
        self._forwarding = forwarding
        self._max_frame_bytes = max_frame_bytes

    def admit(self, target: str, fields: Mapping[str, str]) -> Admitted | EndOfSession:
        """Before the body is read. Raises MeshnetError."""
        if target.startswith(SESSIONS):
            session = wire.parse_session(target.removeprefix(SESSIONS))
            route = wire.parse_route(fields.get(wire.ROUTE.lower(), ""))
            return EndOfSession(session, route, wire.parse_keep(fields.get(wire.KEEP.lower())))
        if target.startswith(RETURNS):
            ticket, frame = target.removeprefix(RETURNS), wire.parse_response_headers(fields)
            self._forwarding.returns.check(ticket, frame)
            return Admitted(frame, ticket, wire.max_body_bytes(frame), fields)
        frame = wire.parse_headers(fields)
        if frame.num_bytes > self._max_frame_bytes:
            raise FrameTooLarge(
                f"a frame of {frame.num_bytes} bytes is over this node's limit of {self._max_frame_bytes}"
            )
        return Admitted(frame, None, wire.max_body_bytes(frame), fields)

    async def answer(self, admitted: Admitted | EndOfSession, body: Buffer) -> Answer:
        """Every failure is an answer with an exact code, and the node lives on."""
        try:
            if isinstance(admitted, EndOfSession):
                await self._forwarding.free(admitted.session, admitted.route, admitted.keep)
                return Answer(204, {wire.VERSION: str(wire.WIRE_VERSION)})
            frame = admitted.frame
            wire.check_digest(admitted.fields, body)
            decoded = wire.decode_body(frame, body)
            if admitted.ticket:
                self._forwarding.returns.deliver(admitted.ticket, decoded)
                return Answer(204, {wire.VERSION: str(wire.WIRE_VERSION)})
            answered, hidden = await self._forwarding.forward(frame.encoded_as(None), decoded)
            body = wire.encode_body(hidden, frame.encoding)
            return Answer(200, wire.seal(wire.format_headers(answered.encoded_as(frame.encoding)), body), body)
        except MeshnetError as error:
            return self.refusal(error)
        except Exception:
            log.exception("a frame failed")
            return self.refusal(MeshnetError("this node failed on the request; its log says why"))

    def refusal(self, error: MeshnetError) -> Answer:
        fields = {"Content-Type": "application/json", **error_headers(error)}
        return Answer(error.status, fields, error_body(error, self._node_id))
