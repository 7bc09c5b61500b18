from __future__ import annotations

import pytest

from tests.faults.http_pieces import Splitter

MESSAGES = (
    b"POST /forward HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
    b"DELETE /sessions/x HTTP/1.1\r\nHost: x\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n\r\n\r"
)


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_messages_are_found_however_they_arrive(size: int) -> None:
    splitter = Splitter()
    pieces = [
        piece for start in range(0, len(MESSAGES), size) for piece in splitter.feed(MESSAGES[start : start + size])
    ]
    assert b"".join(piece.data for piece in pieces) == MESSAGES
    assert b"".join(piece.data for piece in pieces if not piece.is_head) == b"hello\r\n\r"
    assert sum(piece.is_last for piece in pieces) == 3
    assert [piece.body_bytes for piece in pieces if piece.is_head] == [5, 0, 3]


def test_what_comes_in_chunks_passes_as_it_is() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    pieces = Splitter().feed(chunked)
    assert b"".join(piece.data for piece in pieces) == chunked
    assert all(piece.is_head and not piece.is_last for piece in pieces)


@pytest.mark.parametrize(
    "stream", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00", b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"]
)
def test_what_is_not_of_this_version_passes_as_it_comes(stream: bytes) -> None:
    splitter = Splitter()
    for start in range(0, len(stream), 6):
        (piece,) = splitter.feed(stream[start : start + 6])
        assert (piece.data, piece.is_last) == (stream[start : start + 6], False)
