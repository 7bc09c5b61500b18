"""The golden frames, made independently of this project."""

from __future__ import annotations

import array
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from meshnet import wire
from meshnet.errors import MeshnetError

GOLDEN = Path(__file__).parents[2] / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
GOOD = [case for case in CASES if "values_u16" in case]
BAD = [case for case in CASES if "error" in case]
RAW = [case for case in GOOD if wire.parse_headers(case["headers"]).encoding is None]


def body_of(case: dict[str, Any]) -> bytes:
    return (GOLDEN / str(case["body"])).read_bytes()


def name_of(case: dict[str, Any]) -> str:
    return str(case["name"])


def values_u16(data: memoryview) -> list[int]:
    values = array.array("H", data.tobytes())
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def test_every_case_is_good_or_bad_and_every_body_has_a_case() -> None:
    assert len(GOOD) + len(BAD) == len(CASES)
    assert {case["body"] for case in CASES} == {path.name for path in GOLDEN.glob("*.bin")}


@pytest.mark.parametrize("case", GOOD, ids=name_of)
def test_good_frames_decode_to_their_values(case: dict[str, Any]) -> None:
    frame = wire.parse_headers(case["headers"])
    body = body_of(case)
    assert len(body) <= wire.max_body_bytes(frame)
    assert values_u16(wire.decode_body(frame, body)) == case["values_u16"]


@pytest.mark.parametrize("case", RAW, ids=name_of)
def test_raw_frames_encode_byte_for_byte(case: dict[str, Any]) -> None:
    frame = wire.parse_headers(case["headers"])
    body = body_of(case)
    assert bytes(wire.encode_body(wire.decode_body(frame, body), frame.encoding)) == body
    written = {name.lower(): value for name, value in wire.format_headers(frame).items()}
    # The version may be left out by others, but is always written here.
    assert written == {wire.VERSION.lower(): "1"} | {name.lower(): value for name, value in case["headers"].items()}


@pytest.mark.parametrize("case", [case for case in GOOD if case not in RAW], ids=name_of)
def test_zstd_frames_encode_value_for_value(case: dict[str, Any]) -> None:
    frame = wire.parse_headers(case["headers"])
    encoded = wire.encode_body(wire.decode_body(frame, body_of(case)), frame.encoding)
    again = wire.parse_headers(wire.format_headers(frame))
    assert again == frame
    assert values_u16(wire.decode_body(again, encoded)) == case["values_u16"]


@pytest.mark.parametrize("case", BAD, ids=name_of)
def test_bad_frames_are_refused_with_their_code_and_little_memory(case: dict[str, Any]) -> None:
    body = body_of(case)
    tracemalloc.start()
    try:
        with pytest.raises(MeshnetError) as caught:
            wire.decode_body(wire.parse_headers(case["headers"]), body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.code == case["error"]
    assert caught.value.status == 400
    assert str(caught.value)
    assert peak < 256 << 10
