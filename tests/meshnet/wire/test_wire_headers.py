from __future__ import annotations

import contextlib
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from meshnet import wire
from meshnet.errors import BadFrame, MeshnetError, WireVersionMismatch
from meshnet.model import BLOCK_TOKENS, MODEL_ID, LayerRange
from meshnet.topology import NODE_ID, Hop
from meshnet.wire import FrameHeaders, Prefix

SESSION = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
OTHER = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
HEADERS = {
    wire.SHAPE: "1,3,4",
    wire.DTYPE: "bfloat16",
    wire.SESSION: SESSION,
    wire.CHUNK_INDEX: "0",
    wire.CHUNK_TOTAL: "1",
}
NAMES = [
    *HEADERS,
    wire.ENCODING,
    wire.VERSION,
    wire.MODEL,
    wire.POSITION,
    wire.LAYERS,
    wire.ROUTE,
    wire.RETURN,
    wire.ENTRY,
    wire.TICKET,
    wire.PREFIX,
]


def layer_ranges() -> st.SearchStrategy[LayerRange]:
    pairs = st.lists(st.integers(0, wire.MAX_LAYERS), min_size=2, max_size=2, unique=True)
    return pairs.map(sorted).map(lambda pair: LayerRange(*pair))


@st.composite
def frames(draw: st.DrawFn, min_positions: int = 1) -> FrameHeaders:
    rows = draw(st.integers(1, 6))
    positions = draw(st.integers(min_positions, wire.MAX_POSITIONS))
    widest = wire.MAX_FRAME_BYTES // (wire.BYTES_PER_ELEMENT * rows * max(1, positions))
    total = draw(st.integers(1, wire.MAX_CHUNKS))
    node_ids = st.from_regex(NODE_ID, fullmatch=True)
    hops = st.lists(st.builds(Hop, node_ids, layer_ranges()), max_size=4)
    sessions = st.lists(st.uuids(version=4), min_size=rows, max_size=rows, unique=True)
    cached = draw(st.none() | st.lists(st.integers(0, wire.MAX_CACHED), min_size=rows, max_size=rows).map(tuple))
    index = draw(st.integers(0, total - 1))
    prefix = draw(st.none() | st.builds(Prefix, st.uuids(version=1).map(str), st.integers(1, 9000), st.booleans()))
    if prefix:
        prefix, rows, index = replace(prefix, num_tokens=prefix.num_tokens * BLOCK_TOKENS), 1, 0
        cached = (prefix.num_tokens,)
    return FrameHeaders(
        rows=rows,
        positions=positions,
        hidden=draw(st.integers(1, min(widest, wire.MAX_HIDDEN))),
        sessions=tuple(map(str, draw(sessions)))[:rows],
        chunk_index=index,
        chunk_total=total,
        encoding=draw(st.none() | st.sampled_from(wire.Encoding)),
        model=draw(st.none() | st.from_regex(MODEL_ID, fullmatch=True)),
        cached=cached,
        layers=draw(st.none() | layer_ranges()),
        route=tuple(draw(hops)),
        returns=draw(st.none() | st.integers(0, positions)),
        entry=draw(st.none() | node_ids),
        ticket=draw(st.none() | st.from_regex(r"[0-9a-f]{32}", fullmatch=True)),
        prefix=prefix,
    )


def with_header(name: str, value: str) -> dict[str, str]:
    return HEADERS | {name: value}


@settings(deadline=None)
@given(frames())
def test_request_headers_round_trip(frame: FrameHeaders) -> None:
    assert wire.parse_headers(wire.format_headers(frame)) == frame


@settings(deadline=None)
@given(frames(min_positions=0))
def test_response_headers_round_trip(frame: FrameHeaders) -> None:
    assert wire.parse_response_headers(wire.format_headers(frame)) == frame


@settings(deadline=None)
@given(frames())
def test_header_names_have_no_case_in_any_mapping(frame: FrameHeaders) -> None:
    headers = wire.format_headers(frame)
    assert wire.parse_headers({name.lower(): value for name, value in headers.items()}) == frame
    assert wire.parse_headers({name.upper(): value for name, value in headers.items()}) == frame
    assert wire.parse_headers(CIMultiDict(headers)) == frame
    assert wire.parse_headers(CIMultiDictProxy(CIMultiDict(headers))) == frame


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*NAMES, "Content-Type"]), st.text(max_size=40)))
def test_no_text_raises_anything_but_our_errors(changes: dict[str, str]) -> None:
    for parse in (wire.parse_headers, wire.parse_response_headers):
        with contextlib.suppress(MeshnetError):
            parse(HEADERS | changes)


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.text("0123456789,-+_. :abcdefzstdbloat\u0661\xb2", max_size=60))
def test_what_is_accepted_is_written_as_the_same_frame(name: str, value: str) -> None:
    try:
        frame = wire.parse_headers(with_header(name, value))
    except MeshnetError:
        return
    assert wire.parse_headers(wire.format_headers(frame)) == frame
    assert frame.num_bytes <= wire.MAX_FRAME_BYTES


def test_published_headers_alone_have_defaults() -> None:
    frame = wire.parse_headers(HEADERS)
    assert frame == FrameHeaders(rows=1, positions=3, hidden=4, sessions=(SESSION,))
    assert (frame.elements, frame.num_bytes) == (12, 24)
    assert (frame.chunk_index, frame.chunk_total, frame.route, frame.returns) == (0, 1, (), None)


def test_sessions_are_canonical_lower_case() -> None:
    frame = wire.parse_headers(with_header(wire.SESSION, SESSION.upper()))
    assert frame.sessions == (SESSION,) == (str(UUID(SESSION)),)


def test_the_largest_batch_fits_its_own_limits() -> None:
    sessions = tuple(str(UUID(int=row)) for row in range(wire.MAX_ROWS))
    route = (Hop("n" * 64, LayerRange(wire.MAX_LAYERS - 1, wire.MAX_LAYERS)),) * wire.MAX_HOPS
    cached = (wire.MAX_CACHED,) * wire.MAX_ROWS
    frame = FrameHeaders(wire.MAX_ROWS, 1, 16384, sessions, cached=cached, route=route)
    headers = wire.format_headers(frame)
    assert max(map(len, headers.values())) <= wire.MAX_FIELD_CHARS
    assert wire.parse_headers(headers) == frame


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((wire.SHAPE, value) for value in ("", "1", "1,3", "1,3,4,5", ",,", "1,3,", "0,3,4", "1,3,0", "1025,1,4")),
        *((wire.SHAPE, f"1,{text},4") for text in ("+3", " 3", "3 ", "1_0", "3.0", "0x3", "٣", "²", "1e3", "9" * 5000)),
        (wire.SHAPE, "1024,1024,1024"),
        (wire.SHAPE, "1048577,1,1"),
        (wire.SHAPE, "1,1048577,1"),
        (wire.SHAPE, "1,1,1048577"),
        (wire.DTYPE, "BFLOAT16"),
        (wire.DTYPE, ""),
        *((wire.SESSION, value) for value in ("", "..", SESSION[:-1], f"{{{SESSION}}}", f"urn:uuid:{SESSION}")),
        (wire.SESSION, SESSION + ","),
        (wire.SESSION, SESSION.replace("-", "")),
        (wire.SESSION, f"{SESSION},{OTHER}"),
        (wire.SESSION, SESSION + "\n"),
        (wire.CHUNK_INDEX, "1"),
        (wire.CHUNK_TOTAL, "0"),
        (wire.ENCODING, ""),
        (wire.ENCODING, "ZSTD"),
        (wire.MODEL, ""),
        (wire.MODEL, "../model"),
        (wire.POSITION, ""),
        (wire.POSITION, "1,2"),
        (wire.POSITION, "9999999999"),
        *((wire.LAYERS, value) for value in ("", "4", "4,4", "8,4", "4-8", "4,8,9", "-4,8", "0,99999")),
        *((wire.ROUTE, value) for value in ("a", "a:", "a:4", "a:8-4", "a:4-4", ":4-8", "a/b:4-8", "a:4-8,")),
        (wire.ROUTE, "a:4-8-9"),
        (wire.ROUTE, "10.0.0.1:80:4-8"),
        (wire.ROUTE, "n" * 65 + ":4-8"),
        (wire.ROUTE, ",".join(["a:4-8"] * (wire.MAX_HOPS + 1))),
        (wire.ROUTE, "a" * (wire.MAX_FIELD_CHARS + 1)),
        (wire.RETURN, "4"),
        (wire.RETURN, "-1"),
        (wire.RETURN, ""),
        (wire.ENTRY, ""),
        (wire.ENTRY, "10.0.0.1:80"),
        (wire.TICKET, ""),
        (wire.TICKET, "../forward"),
        ("Content-Type", "text/plain"),
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Content-Type", ""),
    ],
)  # fmt: skip
def test_bad_values_are_refused_and_named(name: str, value: str) -> None:
    with pytest.raises(BadFrame) as caught:
        wire.parse_headers(with_header(name, value))
    assert name in str(caught.value)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", [wire.SHAPE, wire.DTYPE, wire.SESSION])
def test_required_headers_are_named_when_missing(name: str) -> None:
    with pytest.raises(BadFrame, match=f"{name} is missing"):
        wire.parse_headers({key: value for key, value in HEADERS.items() if key != name})


@pytest.mark.parametrize("version", ["", "0", "2", "01", "1.0", " 1", "one"])
def test_another_version_is_refused_before_all_else(version: str) -> None:
    with pytest.raises(WireVersionMismatch, match="1 is"):
        wire.parse_headers({wire.VERSION: version, wire.SHAPE: "nonsense", "Content-Type": "text/plain"})


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
def test_json_is_another_version(content_type: str) -> None:
    with pytest.raises(WireVersionMismatch, match="retired"):
        wire.parse_headers(HEADERS | {"content-type": content_type})


@pytest.mark.parametrize("content_type", [wire.CONTENT_TYPE, "Application/Octet-Stream", wire.CONTENT_TYPE + "; x=y"])
def test_binary_content_types_are_accepted(content_type: str) -> None:
    assert wire.parse_headers(HEADERS | {"Content-Type": content_type}) == wire.parse_headers(HEADERS)


@pytest.mark.parametrize("name", NAMES)
def test_a_header_given_twice_is_refused(name: str) -> None:
    frame = FrameHeaders(
        rows=1,
        positions=3,
        hidden=4,
        sessions=(SESSION,),
        encoding=wire.Encoding.ZSTD,
        model="golden",
        cached=(128,),
        layers=LayerRange(4, 8),
        route=(Hop("node-b", LayerRange(8, 9)),),
        returns=1,
        entry="node-a",
        ticket="0" * 32,
        prefix=Prefix(OTHER, 128, take=True),
    )
    headers = CIMultiDict(wire.format_headers(frame))
    headers.add(name, headers[name])
    with pytest.raises((BadFrame, WireVersionMismatch), match=name):
        wire.parse_headers(headers)


@pytest.mark.parametrize(
    "value",
    [
        "",
        OTHER,
        f"{OTHER},128",
        f"{OTHER},128,",
        f"{OTHER},128,move",
        f"{OTHER},128,TAKE",
        f"{OTHER},128,take,copy",
        f"{OTHER}, 128,take",
        f"{OTHER},+128,take",
        f"{OTHER},0,take",
        f"{OTHER},127,take",
        f"{OTHER},200,take",
        f"{OTHER},{1 << 31},take",
        f"{OTHER},256,take",
        f"{OTHER[:-1]},128,take",
        f"{SESSION},128,take",
        ",128,take",
    ],
)
def test_prefixes_that_are_not_whole_and_plain_are_refused(value: str) -> None:
    with pytest.raises(BadFrame, match=wire.PREFIX):
        wire.parse_headers(HEADERS | {wire.POSITION: "128", wire.PREFIX: value})


def test_a_prefix_comes_before_the_first_frame_of_one_session() -> None:
    good = HEADERS | {wire.POSITION: "128", wire.PREFIX: f"{OTHER.upper()},128,copy"}
    assert wire.parse_headers(good).prefix == Prefix(OTHER, 128, take=False)
    two_rows = {wire.SHAPE: "2,1,4", wire.SESSION: f"{SESSION},{UUID(int=1)!s}", wire.POSITION: "128,128"}
    for worse in ({wire.CHUNK_INDEX: "1", wire.CHUNK_TOTAL: "2"}, {wire.POSITION: "0"}, two_rows):
        with pytest.raises(BadFrame, match=wire.PREFIX):
            wire.parse_headers(good | worse)
    with pytest.raises(BadFrame, match=wire.PREFIX):
        wire.parse_headers({name: value for name, value in good.items() if name != wire.POSITION})


def test_how_much_is_kept_is_a_plain_number() -> None:
    assert (wire.parse_keep(None), wire.parse_keep("0"), wire.parse_keep("300")) == (None, 0, 300)
    for value in ("", "-1", "1.0", "128,128", " 128", "all", "9" * 40):
        with pytest.raises(BadFrame, match=wire.KEEP):
            wire.parse_keep(value)


def test_only_responses_may_have_no_positions() -> None:
    nothing = with_header(wire.SHAPE, "1,0,4")
    assert wire.parse_response_headers(nothing).num_bytes == 0
    with pytest.raises(BadFrame, match=wire.SHAPE):
        wire.parse_headers(nothing)


def test_routes_are_read_without_a_frame() -> None:
    route = (Hop("node-b", LayerRange(4, 8)), Hop("node_c.1", LayerRange(8, 12)))
    assert wire.format_route(route) == "node-b:4-8,node_c.1:8-12"
    assert wire.parse_route("node-b:4-8,node_c.1:8-12") == route
    assert wire.parse_route("") == ()


def test_an_empty_route_is_written_by_who_names_the_layers() -> None:
    frame = FrameHeaders(1, 1, 4, (SESSION,), layers=LayerRange(4, 8))
    assert wire.format_headers(frame)[wire.ROUTE] == ""
    assert wire.ROUTE not in wire.format_headers(FrameHeaders(1, 1, 4, (SESSION,)))
