"""Digests of frames: whatever was changed on the way is told, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet import wire
from meshnet.errors import CorruptFrame
from meshnet.model import LayerRange
from meshnet.topology import Hop
from meshnet.wire import FrameHeaders, Prefix

SESSION = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
FRAME = FrameHeaders(
    1,
    2,
    4,
    (SESSION,),
    model="m",
    cached=(128,),
    layers=LayerRange(0, 4),
    route=(Hop("c", LayerRange(4, 8)),),
    returns=1,
    entry="a",
    ticket="0" * 32,
    prefix=Prefix(SESSION.replace("3", "4"), 128, take=True),
)
BODY = bytes(range(16))


def sealed(body: bytes = BODY) -> dict[str, str]:
    return wire.seal(wire.format_headers(FRAME), body)


def arrived(headers: dict[str, str]) -> wire.Fields:
    return wire.Fields.of(headers.items())


def test_what_arrives_as_it_was_sent_is_taken() -> None:
    for body in (BODY, b"", memoryview(BODY)):
        wire.check_digest(arrived(sealed(bytes(body))), body)


def test_what_has_no_digest_is_not_checked() -> None:
    wire.check_digest(arrived(wire.format_headers(FRAME)), BODY)


@given(st.integers(0, 8 * len(BODY) - 1))
def test_every_bit_of_the_body_counts(bit: int) -> None:
    changed = bytearray(BODY)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptFrame):
        wire.check_digest(arrived(sealed()), changed)


@pytest.mark.parametrize("name", sorted(sealed().keys() - {"Content-Type"}))
@pytest.mark.parametrize("is_gone", [False, True])
def test_every_header_counts(name: str, is_gone: bool) -> None:
    headers = sealed()
    value = headers.pop(name)
    if not is_gone:
        headers[name] = value[:-1] + chr(ord(value[-1]) ^ 1)
    if name == wire.DIGEST and is_gone:
        return
    with pytest.raises(CorruptFrame):
        wire.check_digest(arrived(headers), BODY)
