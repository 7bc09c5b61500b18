"""Where messages of HTTP/1.1 begin and end in a stream of bytes, as far as their length is declared."""

from __future__ import annotations

import re
from dataclasses import dataclass

_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_PIECES = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
# HTTP/2 begins with PRI, or with a frame.
_MAY_BEGIN = re.compile(rb"(?!PRI \*)[A-Z]")
_MAX_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of a message: of its body from `start` on, or of its head (`start` None). `body_bytes`: of the whole
    body. `is_last`: the message ends with it."""

    data: bytes
    start: int | None
    body_bytes: int
    is_last: bool

    @property
    def is_head(self) -> bool:
        return self.start is None


class Splitter:
    """Of one way of a connection. Heads come as one piece, bodies as they arrive. What is not understood comes through
    as one endless head."""

    def __init__(self) -> None:
        self._head = b""
        self._body_bytes = self._done = 0
        self._is_lost = False

    def feed(self, data: bytes) -> list[Piece]:
        """The pieces that these bytes complete."""
        pieces: list[Piece] = []
        while data:
            if self._is_lost:
                pieces.append(Piece(data, None, 0, is_last=False))
                break
            is_body = self._done < self._body_bytes
            piece, data = self._of_body(data) if is_body else self._of_head(data)
            pieces += [piece] if piece else []
        return pieces

    def _of_body(self, data: bytes) -> tuple[Piece | None, bytes]:
        start, taken = self._done, data[: self._body_bytes - self._done]
        self._done += len(taken)
        return Piece(taken, start, self._body_bytes, self._done == self._body_bytes), data[len(taken) :]

    def _of_head(self, data: bytes) -> tuple[Piece | None, bytes]:
        self._head += data
        if not _MAY_BEGIN.match(self._head):
            self._is_lost, data, self._head = True, self._head, b""
            return None, data
        end = self._head.find(_END_OF_HEAD)
        if end < 0 and len(self._head) <= _MAX_HEAD_BYTES:
            return None, b""
        end = len(self._head) if end < 0 else end + len(_END_OF_HEAD)
        head, rest, self._head = self._head[:end], self._head[end:], b""
        self._is_lost = bool(_PIECES.search(head)) or len(head) > _MAX_HEAD_BYTES
        length = _LENGTH.search(head)
        self._body_bytes, self._done = int(length[1]) if length else 0, 0
        return Piece(head, None, self._body_bytes, not self._body_bytes and not self._is_lost), rest
