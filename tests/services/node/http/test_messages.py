"""Heads of messages: what is plainly a frame, what is an answer, and what is neither."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet import wire
from services.node.http.messages import (
    Answer,
    BadAnswer,
    RequestHead,
    format_answer,
    format_request,
    parse_answer,
    parse_request,
)

START = "POST /forward HTTP/1.1\r\n"
TICKET = "0123456789abcdef" * 2


def _text(head: bytes) -> str:
    """As it is parsed: without the empty line."""
    assert head.endswith(b"\r\n\r\n")
    return head[:-2].decode("ascii")


@pytest.mark.parametrize("target", ["/forward", f"/returns/{TICKET}"])
def test_a_frame_is_read_as_it_was_written(target: str) -> None:
    fields = {wire.SHAPE: "1,3,4", wire.SESSION: "a,b", "Content-Type": wire.CONTENT_TYPE}
    head = parse_request(_text(format_request("POST", target, "[::1]:7710", fields, 24)))
    expected = {name.lower(): value for name, value in fields.items()}
    assert head == RequestHead(target, wire.Fields(expected | {"host": "[::1]:7710", "content-length": "24"}), 24)


def test_the_end_of_a_session_has_no_body() -> None:
    line = "DELETE /sessions/3f2504e0-4f89-41d3-9a0c-0305e82c3301 HTTP/1.1\r\n"
    for more in ("", "Content-Length: 0\r\n"):
        head = parse_request(line + more)
        assert head
        assert (head.target, head.num_bytes) == ("/sessions/3f2504e0-4f89-41d3-9a0c-0305e82c3301", 0)
    assert parse_request(line + "Content-Length: 1\r\n") is None
    assert parse_request(line.replace("DELETE", "POST") + "Content-Length: 0\r\n") is None


def test_names_have_no_case_and_a_field_given_twice_has_both_values() -> None:
    head = parse_request(f"{START}CONTENT-length:  7 \r\nX-Meshnet-Shape: 1\r\nx-meshnet-shape:2\r\nEmpty:\r\n")
    assert head
    assert (head.num_bytes, head.fields) == (7, {"content-length": "7", "x-meshnet-shape": "1, 2", "empty": ""})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GET /forward HTTP/1.1\r\nContent-Length: 1\r\n",
        "POST /forward HTTP/1.0\r\nContent-Length: 1\r\n",
        "POST /forward?a=1 HTTP/1.1\r\nContent-Length: 1\r\n",
        "POST /returns/1 HTTP/1.1\r\nContent-Length: 1\r\n",
        "POST  /forward HTTP/1.1\r\nContent-Length: 1\r\n",
        START,
        f"{START}Content-Length: 1",
        f"{START}Content-Length: 1\r\nContent-Length: 1\r\n",
        f"{START}Content-Length: -1\r\n",
        f"{START}Content-Length: +1\r\n",
        f"{START}Content-Length: 0x10\r\n",
        f"{START}Content-Length: \xb2\r\n",
        f"{START}Content-Length: {'9' * 5000}\r\n",
        f"{START}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        f"{START}Content-Length: 1\r\nExpect: 100-continue\r\n",
        f"{START}Content-Length: 1\r\nConnection: close\r\n",
        f"{START}Content-Length: 1\r\nUpgrade: websocket\r\n",
        f"{START}Content-Length: 1\r\n folded\r\n",
        f"{START}Content-Length : 1\r\n",
        f"{START}Content-Length: 1\r\n: nameless\r\n",
        f"{START}Content-Length: 1\r\nA: b\0c\r\n",
        f"{START}Content-Length: 1\r\nA: b\nTransfer-Encoding: chunked\r\n",
        f"{START}Content-Length: 1\r\nA: b\rc\r\n",
        f"{START}Content-Length: 1\r\nA: \xe9\r\n",
    ],
)
def test_what_is_not_plainly_a_frame_is_left_to_others(text: str) -> None:
    assert parse_request(text) is None


def test_an_answer_is_read_as_it_was_written() -> None:
    answer = Answer(409, {wire.CACHED_LENGTH: "3"}, b"{}")
    for stays_open in (True, False):
        head = parse_answer(_text(format_answer(answer, "Mon, 30 Nov 2026 20:00:00 GMT", stays_open=stays_open)))
        assert (head.status, head.num_bytes, head.stays_open) == (409, 2, stays_open)
        assert head.fields[wire.CACHED_LENGTH.lower()] == "3"


def test_an_answer_without_content_has_no_length() -> None:
    text = _text(format_answer(Answer(204, {}), "now", stays_open=True))
    assert "Content-Length" not in text
    assert parse_answer(text).num_bytes == 0


@pytest.mark.parametrize(
    "text", ["HTTP/1.1 200\r\nContent-Length: 0\r\n", "HTTP/1.1 299 \xa7 7\r\nContent-Length: 0\r\n"]
)
def test_the_reason_of_an_answer_is_anything_printable(text: str) -> None:
    if text.isascii():
        assert parse_answer(text).num_bytes == 0
    else:
        with pytest.raises(BadAnswer):
            parse_answer(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SSH-2.0-OpenSSH_9.2\r\n",
        "HTTP/1.0 200 OK\r\nContent-Length: 0\r\n",
        "HTTP/2 200\r\nContent-Length: 0\r\n",
        "HTTP/1.1 100 Continue\r\n",
        "HTTP/1.1 20 OK\r\nContent-Length: 0\r\n",
        "HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nno colon\r\n",
    ],
)
def test_nonsense_is_no_answer(text: str) -> None:
    with pytest.raises(BadAnswer):
        parse_answer(text)


@given(st.text(st.characters(max_codepoint=255)))
def test_no_text_is_fatal(text: str) -> None:
    for start in ("", START, "HTTP/1.1 200 OK\r\n"):
        assert parse_request(start + text) is None or "content-length" in text.lower()
        with contextlib.suppress(BadAnswer):
            assert parse_answer(start + text).status == 200
