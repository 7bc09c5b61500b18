"""Frame headers to and from text. Every check of a header's text is here, before any allocation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from meshnet.errors import BadFrame, WireVersionMismatch
from meshnet.model import BLOCK_TOKENS, MODEL_ID, LayerRange
from meshnet.topology import NODE_ID, Hop
from meshnet.wire.frame import (
    BYTES_PER_ELEMENT,
    CHUNK_INDEX,
    CHUNK_TOTAL,
    CONTENT_TYPE,
    DTYPE,
    DTYPE_NAME,
    ENCODING,
    ENTRY,
    KEEP,
    LAYERS,
    MAX_CACHED,
    MAX_CHUNKS,
    MAX_FIELD_CHARS,
    MAX_FRAME_BYTES,
    MAX_HIDDEN,
    MAX_HOPS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_ROWS,
    MODEL,
    POSITION,
    PREFIX,
    RETURN,
    ROUTE,
    SESSION,
    SHAPE,
    TICKET,
    VERSION,
    WIRE_VERSION,
    Encoding,
    FrameHeaders,
    Prefix,
)

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TICKET = re.compile(r"[0-9a-f]{32}")
_INTEGERS = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_TAKE, _COPY = "take", "copy"
_MAX_DIGITS = 10
_MAX_SHOWN = 80


def parse_headers(headers: Mapping[str, str]) -> FrameHeaders:
    """The headers of a request. Names have no case; a header given twice is refused.

    Raises WireVersionMismatch for another wire version or a JSON body, BadFrame for anything else that is wrong.
    """
    return _parse(headers, min_positions=1)


def parse_response_headers(headers: Mapping[str, str]) -> FrameHeaders:
    """The headers of a response, whose positions may be 0. Raises as `parse_headers` does."""
    return _parse(headers, min_positions=0)


def format_headers(frame: FrameHeaders) -> dict[str, str]:
    """The headers of a request or response, with the content type; the inverse of both parsers."""
    headers = {
        "Content-Type": CONTENT_TYPE,
        VERSION: str(WIRE_VERSION),
        SHAPE: f"{frame.rows},{frame.positions},{frame.hidden}",
        DTYPE: DTYPE_NAME,
        SESSION: ",".join(frame.sessions),
        CHUNK_INDEX: str(frame.chunk_index),
        CHUNK_TOTAL: str(frame.chunk_total),
    }
    if frame.encoding is not None:
        headers[ENCODING] = frame.encoding.value
    if frame.model is not None:
        headers[MODEL] = frame.model
    if frame.cached is not None:
        headers[POSITION] = ",".join(map(str, frame.cached))
    if frame.layers is not None:
        headers[LAYERS] = f"{frame.layers.start},{frame.layers.end}"
    # Who says which layers to run also says, with an empty route, that they are the last.
    if frame.route or frame.layers is not None:
        headers[ROUTE] = format_route(frame.route)
    if frame.returns is not None:
        headers[RETURN] = str(frame.returns)
    if frame.entry is not None:
        headers[ENTRY] = frame.entry
    if frame.ticket is not None:
        headers[TICKET] = frame.ticket
    if (prefix := frame.prefix) is not None:
        headers[PREFIX] = f"{prefix.session},{prefix.num_tokens},{_TAKE if prefix.take else _COPY}"
    return headers


def parse_session(text: str) -> str:
    """A session's UUID in its canonical lower-case form. Raises BadFrame."""
    session = text.lower()
    if not _UUID.fullmatch(session):
        raise _bad(SESSION, text, "is not a UUID, such as 3f2504e0-4f89-41d3-9a0c-0305e82c3301")
    return session


def parse_route(text: str) -> tuple[Hop, ...]:
    """Hops from `node_id:start-end,...`; empty text is no hops. Raises BadFrame."""
    if not text:
        return ()
    hops = text.split(",", MAX_HOPS)
    if len(hops) > MAX_HOPS:
        raise _bad(ROUTE, text, f"has more than {MAX_HOPS} hops")
    return tuple(map(_parse_hop, hops))


def format_route(route: tuple[Hop, ...]) -> str:
    """The inverse of `parse_route`."""
    return ",".join(map(str, route))


def parse_keep(text: str | None) -> int | None:
    """How many tokens of a session's KV cache are kept when it ends; None: none. Raises BadFrame."""
    return None if text is None else _integer(KEEP, text, 0, MAX_CACHED)


class Fields(dict[str, str]):
    """Header fields by lower-case name; those that came more than once have their values joined as HTTP joins them."""

    @classmethod
    def of(cls, named: Iterable[tuple[str, str]]) -> Fields:
        fields = cls()
        for name, value in named:
            key = name.lower()
            fields[key] = f"{fields[key]}, {value}" if key in fields else value
        return fields


def _parse(headers: Mapping[str, str], min_positions: int) -> FrameHeaders:
    # No check accepts what a repeated field becomes.
    fields = headers if isinstance(headers, Fields) else Fields.of(headers.items())
    texts = tuple(map(fields.get, _STEADY_KEYS))
    parse_steady = _parse_remembered if sum(map(len, filter(None, texts))) <= _MAX_REMEMBERED_CHARS else _parse_steady
    frame = parse_steady(min_positions, texts)
    position, ticket, prefix = map(fields.get, _CHANGING_KEYS)
    if position is None and ticket is None and prefix is None:
        return frame
    frame = replace(
        frame,
        cached=_parse_cached(position, frame.rows),
        ticket=_parse_ticket(ticket),
        prefix=_parse_prefix(prefix),
    )
    _check_prefix(frame)
    return frame


def _parse_steady(min_positions: int, texts: tuple[str | None, ...]) -> FrameHeaders:
    """What is the same in all decode frames of the same sessions. `texts`: values of _STEADY_KEYS."""
    fields = {key: text for key, text in zip(_STEADY_KEYS, texts, strict=True) if text is not None}
    _check_version(fields)
    _check_content_type(fields)
    _check_lengths(fields)
    if (dtype := _required(fields, DTYPE)) != DTYPE_NAME:
        raise _bad(DTYPE, dtype, f"is not {DTYPE_NAME}, the only one on this wire")
    rows, positions, hidden = _parse_shape(_required(fields, SHAPE), min_positions)
    index, total = _parse_chunk(fields)
    returns = fields.get(_key(RETURN))
    return FrameHeaders(
        rows=rows,
        positions=positions,
        hidden=hidden,
        sessions=_parse_sessions(_required(fields, SESSION), rows),
        chunk_index=index,
        chunk_total=total,
        encoding=_parse_encoding(fields.get(_key(ENCODING))),
        model=_parse_model(fields.get(_key(MODEL))),
        layers=_parse_layers(fields.get(_key(LAYERS))),
        route=parse_route(fields.get(_key(ROUTE), "")),
        returns=None if returns is None else _integer(RETURN, returns, 0, positions),
        entry=_parse_entry(fields.get(_key(ENTRY))),
    )


# Errors are not remembered.
_parse_remembered = lru_cache(maxsize=256)(_parse_steady)
_MAX_REMEMBERED_CHARS = 4096

_LOWER = {
    name: name.lower()
    for name in (
        SHAPE, DTYPE, SESSION, CHUNK_INDEX, CHUNK_TOTAL, ENCODING, VERSION, MODEL, POSITION, LAYERS, ROUTE, RETURN,
        ENTRY, TICKET, PREFIX,
    )
}  # fmt: skip
_key = _LOWER.__getitem__

# Names of all headers that say something of a frame.
KEYS = tuple(_LOWER)
_CHANGING_KEYS = tuple(map(_key, (POSITION, TICKET, PREFIX)))
_STEADY_KEYS = ("content-type", *(key for key in _LOWER.values() if key not in _CHANGING_KEYS))


def _check_version(fields: dict[str, str]) -> None:
    version = fields.get(_key(VERSION))
    if version is not None and version != str(WIRE_VERSION):
        raise WireVersionMismatch(f"{VERSION}: {_shown(version)} is not spoken here, {WIRE_VERSION} is")


def _check_content_type(fields: dict[str, str]) -> None:
    content_type = fields.get("content-type")
    if content_type is None or content_type == CONTENT_TYPE:
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type.endswith(("/json", "+json")):
        raise WireVersionMismatch(
            f"Content-Type: {_shown(content_type)} is the retired JSON format; wire version {WIRE_VERSION} sends raw "
            f"{DTYPE_NAME} as {CONTENT_TYPE}"
        )
    if media_type != CONTENT_TYPE:
        raise _bad("Content-Type", content_type, f"is not {CONTENT_TYPE}")


def _check_lengths(fields: dict[str, str]) -> None:
    for name, key in _LOWER.items():
        value = fields.get(key)
        if value is not None and len(value) > MAX_FIELD_CHARS:
            raise _too_long(name, value)


def _required(fields: dict[str, str], name: str) -> str:
    value = fields.get(_key(name))
    if value is None:
        raise BadFrame(f"{name} is missing; every frame has {SHAPE}, {DTYPE} and {SESSION}")
    return value


def _parse_shape(text: str, min_positions: int) -> tuple[int, int, int]:
    parts = text.split(",", 3)
    if len(parts) != 3:
        raise _bad(SHAPE, text, "is not rows,positions,hidden, such as 1,128,576")
    rows = _integer(SHAPE, parts[0], 1, MAX_ROWS)
    positions = _integer(SHAPE, parts[1], min_positions, MAX_POSITIONS)
    hidden = _integer(SHAPE, parts[2], 1, MAX_HIDDEN)
    size = rows * positions * hidden * BYTES_PER_ELEMENT
    if size > MAX_FRAME_BYTES:
        raise _bad(SHAPE, text, f"is {size} bytes of {DTYPE_NAME}; a frame has {MAX_FRAME_BYTES} at most")
    return rows, positions, hidden


def _parse_sessions(text: str, rows: int) -> tuple[str, ...]:
    sessions = tuple(map(parse_session, text.split(",")))
    if len(sessions) != rows:
        raise _bad(SESSION, text, f"names {len(sessions)} sessions for {rows} rows; each row has its own")
    if rows > 1 and len(set(sessions)) != rows:
        raise _bad(SESSION, text, "names a session twice; a session has one row of a frame")
    return sessions


def _parse_chunk(fields: dict[str, str]) -> tuple[int, int]:
    total = _integer(CHUNK_TOTAL, fields.get(_key(CHUNK_TOTAL), "1"), 1, MAX_CHUNKS)
    text = fields.get(_key(CHUNK_INDEX), "0")
    index = _integer(CHUNK_INDEX, text, 0, MAX_CHUNKS)
    if index >= total:
        raise _bad(CHUNK_INDEX, text, f"is not below {CHUNK_TOTAL} {total}; the first chunk is 0")
    return index, total


def _parse_encoding(text: str | None) -> Encoding | None:
    if text is None:
        return None
    if text != Encoding.ZSTD.value:
        raise _bad(ENCODING, text, f"is not {Encoding.ZSTD}; leave the header out for a raw body")
    return Encoding.ZSTD


def _parse_model(text: str | None) -> str | None:
    if text is not None and not MODEL_ID.fullmatch(text):
        raise _bad(MODEL, text, "is not a model id")
    return text


def _parse_entry(text: str | None) -> str | None:
    if text is not None and not NODE_ID.fullmatch(text):
        raise _bad(ENTRY, text, "is not a node id")
    return text


def _parse_ticket(text: str | None) -> str | None:
    if text is not None and not _TICKET.fullmatch(text):
        raise _bad(TICKET, text, "is not 32 hexadecimal digits")
    return text


def _parse_prefix(text: str | None) -> Prefix | None:
    if text is None:
        return None
    parts = text.split(",", 3)
    if len(parts) != 3 or parts[2] not in {_TAKE, _COPY}:
        raise _bad(PREFIX, text, f"is not session,tokens,{_TAKE} or session,tokens,{_COPY}")
    if not _UUID.fullmatch(session := parts[0].lower()):
        raise _bad(PREFIX, text, "does not begin with a UUID")
    num_tokens = _integer(PREFIX, parts[1], BLOCK_TOKENS, MAX_CACHED)
    if num_tokens % BLOCK_TOKENS:
        raise _bad(PREFIX, text, f"is not of whole blocks of {BLOCK_TOKENS} tokens")
    return Prefix(session, num_tokens, take=parts[2] == _TAKE)


def _check_prefix(frame: FrameHeaders) -> None:
    if (prefix := frame.prefix) is None:
        return
    said = f"{prefix.session},{prefix.num_tokens}"
    if frame.rows != 1 or frame.chunk_index:
        raise _bad(PREFIX, said, "is for the first frame of one session, and of no other")
    if frame.cached != (prefix.num_tokens,):
        raise _bad(PREFIX, said, f"needs the same number as {POSITION}")
    if prefix.session in frame.sessions:
        raise _bad(PREFIX, said, "is the frame's own session")


def _parse_cached(text: str | None, rows: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    if len(text) > MAX_FIELD_CHARS:
        raise _too_long(POSITION, text)
    parts = text.split(",")
    # All at once, for they are many; what is wrong is found one by one.
    cached = tuple(map(int, parts)) if _INTEGERS.fullmatch(text) else ()
    if not cached or max(cached) > MAX_CACHED:
        cached = tuple(_integer(POSITION, part, 0, MAX_CACHED) for part in parts)
    if len(cached) != rows:
        raise _bad(POSITION, text, f"has {len(cached)} positions for {rows} rows; each row has its own")
    return cached


def _parse_layers(text: str | None) -> LayerRange | None:
    return None if text is None else _layer_range(LAYERS, text, ",")


def _parse_hop(text: str) -> Hop:
    node_id, _, layers = text.partition(":")
    if not NODE_ID.fullmatch(node_id):
        raise _bad(ROUTE, text, "does not begin with a node id; a hop is node_id:start-end")
    return Hop(node_id, _layer_range(ROUTE, layers, "-"))


def _layer_range(header: str, text: str, separator: str) -> LayerRange:
    parts = text.split(separator, 2)
    if len(parts) != 2:
        raise _bad(header, text, f"is not layers start{separator}end, such as 4{separator}8")
    start, end = (_integer(header, part, 0, MAX_LAYERS) for part in parts)
    if start >= end:
        raise _bad(header, text, "holds no layer; start must be below end")
    return LayerRange(start, end)


def _integer(header: str, text: str, low: int, high: int) -> int:
    """Digits only: int() would also take signs, spaces, underscores and the digits of other scripts."""
    if not (len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit()):
        raise _bad(header, text, f"is not a plain integer from {low} to {high}")
    value = int(text)
    if not low <= value <= high:
        raise _bad(header, text, f"is not from {low} to {high}")
    return value


def _too_long(header: str, value: str) -> BadFrame:
    return _bad(header, value, f"is longer than {MAX_FIELD_CHARS} characters")


def _bad(header: str, value: str, wrong: str) -> BadFrame:
    return BadFrame(f"{header}: {_shown(value)} {wrong}")


def _shown(value: str) -> str:
    return ascii(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "...")
