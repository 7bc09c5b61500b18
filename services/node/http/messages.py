"""Heads of HTTP/1.1 messages, to and from text. No event loop, no network.

Only what is certain to be one message with a body of a declared length is read here. Names of fields are lower-case;
a field given twice has both values, joined as HTTP joins them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from meshnet.wire import DIGEST, DIGEST_KEY, Buffer, Fields

# Where frames are posted; behind RETURNS is a ticket. And what is deleted when a session ends.
FORWARD: Final = "/forward"
RETURNS: Final = "/returns/"
SESSIONS: Final = "/sessions/"

_FIELD: Final = r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~]*)\r\n"
_ONE_FIELD = re.compile(_FIELD)
# Possessive: what does not fit is refused in one pass, however long it is.
_ALL_FIELDS = re.compile(rf"(?:{_FIELD.replace('(', '(?:')})*+")
_REQUEST_LINE = re.compile(
    rf"(?:POST ({FORWARD}|{RETURNS}[0-9a-f]{{32}})|DELETE ({SESSIONS}[0-9a-f-]{{36}})) HTTP/1\.1"
)
_STATUS_LINE = re.compile(r"HTTP/1\.1 ([2-5][0-9]{2})(?: [\t -~]*)?")
# Fields that change where a body ends, or what becomes of the connection.
_NOT_PLAIN = frozenset({"transfer-encoding", "expect", "upgrade", "connection"})
_MAX_DIGITS = 10
_MAX_REMEMBERED_CHARS = 4096
_WITHOUT_BODY = frozenset({204, 304})
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class BadAnswer(Exception):
    """What a server answered is no answer that can be taken in. The message says why."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A POST of a frame, or a DELETE of a session, which has no body. `num_bytes`: of the body that follows."""

    target: str
    fields: Fields
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """`num_bytes`: of the body that follows. `stays_open`: whether the connection can be used again."""

    status: int
    fields: Fields
    num_bytes: int
    stays_open: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    fields: Mapping[str, str]
    body: Buffer = b""


def parse_request(text: str) -> RequestHead | None:
    """`text`: start line and fields, each with its line end. None: this is plainly neither."""
    line, _, rest = text.partition("\r\n")
    start = _REQUEST_LINE.fullmatch(line)
    fields = _parse_fields(rest) if start else None
    if start is None or fields is None or not _NOT_PLAIN.isdisjoint(fields):
        return None
    if start[2]:
        return RequestHead(start[2], fields, 0) if fields.get("content-length", "0") == "0" else None
    num_bytes = _length(fields)
    return None if num_bytes is None else RequestHead(start[1], fields, num_bytes)


def parse_answer(text: str) -> AnswerHead:
    """`text` as for `parse_request`. Raises BadAnswer."""
    rest, digest = _without_digest(text)
    head = _parse_remembered(rest) if len(rest) <= _MAX_REMEMBERED_CHARS else _parse_answer(rest)
    return head if digest is None else replace(head, fields=Fields(head.fields, **{DIGEST_KEY: digest}))


def _without_digest(text: str) -> tuple[str, str | None]:
    """It is another one in each answer, when all else is the same."""
    before, found, behind = text.partition(f"\r\n{DIGEST}: ")
    value, line_end, rest = behind.partition("\r\n")
    # If there are two, neither is taken for one.
    return (before + line_end + rest, value) if found and DIGEST not in rest else (text, None)


def _parse_answer(text: str) -> AnswerHead:
    line, _, rest = text.partition("\r\n")
    start, fields = _STATUS_LINE.fullmatch(line), _parse_fields(rest)
    if start is None or fields is None:
        raise BadAnswer(f"{line[:80]!r} does not begin a final answer of HTTP/1.1")
    if "transfer-encoding" in fields:
        raise BadAnswer("the answer is in pieces, where its length should be declared")
    status = int(start[1])
    num_bytes = 0 if status in _WITHOUT_BODY else _length(fields)
    if num_bytes is None:
        raise BadAnswer("the answer does not declare how long it is")
    return AnswerHead(status, fields, num_bytes, fields.get("connection", "keep-alive").lower() == "keep-alive")


# In decode steps of the same sessions an answer's head is that of the step before, within the second. Errors are not
# remembered.
_parse_remembered = lru_cache(maxsize=64)(_parse_answer)


def format_request(method: str, target: str, host: str, fields: Mapping[str, str], num_bytes: int) -> bytes:
    return _format(f"{method} {target} HTTP/1.1", {"Host": host, **fields, "Content-Length": str(num_bytes)})


def format_answer(answer: Answer, date: str, *, stays_open: bool) -> bytes:
    fields = {"Date": date, **answer.fields}
    if answer.status not in _WITHOUT_BODY:
        fields["Content-Length"] = str(memoryview(answer.body).nbytes)
    if not stays_open:
        fields["Connection"] = "close"
    return _format(f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, '')}", fields)


def _format(line: str, fields: Mapping[str, str]) -> bytes:
    text = "".join([line, *[f"\r\n{name}: {value}" for name, value in fields.items()], "\r\n\r\n"])
    assert text.count("\n") == len(fields) + 2, "a field is one line"
    return text.encode("ascii")


def _parse_fields(text: str) -> Fields | None:
    if not _ALL_FIELDS.fullmatch(text):
        return None
    return Fields.of((name, value.strip()) for name, value in _ONE_FIELD.findall(text))


def _length(fields: Mapping[str, str]) -> int | None:
    text = fields.get("content-length", "")
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None
