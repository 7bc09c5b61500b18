from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet import wire
from meshnet.errors import BadFrame
from meshnet.wire import Encoding, FrameHeaders

GOLDEN = Path(__file__).parents[2] / "golden"
SESSION = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
KIB, MIB = 1 << 10, 1 << 20
# Objects of ours around the tensor: views, errors, messages.
SLACK_BYTES = 64 * KIB

even_bytes = st.binary(max_size=2048).map(lambda data: data[: len(data) & ~1])
some_even_bytes = st.binary(min_size=2, max_size=2048).map(lambda data: data[: len(data) & ~1])
encodings = st.none() | st.sampled_from(Encoding)


def frame_of(num_bytes: int, encoding: Encoding | None = Encoding.ZSTD) -> FrameHeaders:
    return FrameHeaders(1, num_bytes // 2, 1, (SESSION,), encoding=encoding)


def piped(data: bytes, level: int = 1, window_log: int = 19, checksum: bool = False) -> bytes:
    """What `zstd` writes from a pipe: no declared size, and an empty last block."""
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=level, window_log=window_log, write_content_size=0, write_checksum=checksum
    )
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(data) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + stream.flush()


def peak_of_refusal(frame: FrameHeaders, body: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            wire.decode_body(frame, body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@settings(deadline=None)
@given(even_bytes, encodings)
def test_any_body_round_trips(data: bytes, encoding: Encoding | None) -> None:
    frame = frame_of(len(data), encoding)
    body = wire.encode_body(data, encoding)
    assert len(body) <= wire.max_body_bytes(frame)
    assert wire.decode_body(frame, body) == data


@settings(deadline=None)
@given(some_even_bytes, st.integers(1, 9), st.booleans())
def test_frames_of_undeclared_size_are_read(data: bytes, level: int, checksum: bool) -> None:
    assert wire.decode_body(frame_of(len(data)), piped(data, level, checksum=checksum)) == data


@pytest.mark.parametrize("size", [128 * KIB - 2, 128 * KIB, 128 * KIB + 2, MIB, 3 * MIB])
@pytest.mark.parametrize("checksum", [False, True])
def test_block_edges_of_undeclared_size(size: int, checksum: bool) -> None:
    body = piped(bytes(size), checksum=checksum)
    assert wire.decode_body(frame_of(size), body) == bytes(size)
    for wrong in (body[:-1], body + b"\0", body + body):
        with pytest.raises(BadFrame):
            wire.decode_body(frame_of(size), wrong)


@settings(deadline=None)
@given(st.binary(max_size=600), st.integers(0, 64), st.booleans())
def test_any_bytes_as_zstd_are_refused_or_fit_the_shape(body: bytes, elements: int, magic: bool) -> None:
    frame = frame_of(2 * elements)
    body = zstandard.FRAME_HEADER + body if magic else body
    with contextlib.suppress(BadFrame):
        assert len(wire.decode_body(frame, body)) == frame.num_bytes


@settings(deadline=None)
@given(some_even_bytes, st.booleans(), st.integers(0), st.integers(1, 255))
def test_a_changed_byte_never_escapes_the_bound(data: bytes, declared: bool, where: int, flip: int) -> None:
    body = bytearray(wire.encode_body(data, Encoding.ZSTD) if declared else piped(data))
    body[where % len(body)] ^= flip
    tracemalloc.start()
    try:
        with contextlib.suppress(BadFrame):
            assert len(wire.decode_body(frame_of(len(data)), body)) == len(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(data) + SLACK_BYTES


@settings(deadline=None)
@given(some_even_bytes, st.booleans(), st.data())
def test_no_part_of_a_frame_is_a_frame(data: bytes, declared: bool, draw: st.DataObject) -> None:
    body = bytes(wire.encode_body(data, Encoding.ZSTD)) if declared else piped(data)
    cut = draw.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:cut], body + body[: cut + 1]):
        with pytest.raises(BadFrame):
            wire.decode_body(frame_of(len(data)), wrong)


@settings(deadline=None)
@given(even_bytes, st.integers(0, 2048))
def test_raw_bodies_of_another_length_are_refused(data: bytes, elements: int) -> None:
    if 2 * elements == len(data):
        assert wire.decode_body(frame_of(len(data), None), data) == data
    else:
        with pytest.raises(BadFrame, match=f"{len(data)} bytes.*takes {2 * elements}"):
            wire.decode_body(frame_of(2 * elements, None), data)


@pytest.mark.parametrize("body", [bytes(24), bytearray(24), memoryview(bytes(24))])
def test_raw_bodies_are_never_copied(body: wire.Buffer) -> None:
    assert wire.encode_body(body, None) is body
    owner = body.obj if isinstance(body, memoryview) else body
    assert wire.decode_body(frame_of(24, None), body).obj is owner


def test_views_of_wider_items_count_in_bytes() -> None:
    body = memoryview(bytes(range(24))).cast("H", (3, 4))
    assert wire.decode_body(frame_of(24, None), body) == bytes(range(24))
    encoded = wire.encode_body(body, Encoding.ZSTD)
    assert wire.decode_body(frame_of(24), encoded) == bytes(range(24))


def test_what_is_sent_as_zstd_declares_its_size_in_a_small_window() -> None:
    for size in (2, 1152, 128 * KIB, 12 * MIB):
        parameters = zstandard.get_frame_parameters(bytes(wire.encode_body(bytes(size), Encoding.ZSTD)))
        assert parameters.content_size == size
        assert parameters.window_size <= MIB


def test_nothing_is_an_empty_body_in_any_encoding() -> None:
    frame = FrameHeaders(1, 0, 576, (SESSION,), encoding=Encoding.ZSTD)
    assert len(wire.encode_body(b"", Encoding.ZSTD)) == 0
    assert wire.max_body_bytes(frame) == 0
    assert len(wire.decode_body(frame, b"")) == 0
    with pytest.raises(BadFrame):
        wire.decode_body(frame, b"\0")


def test_skippable_frames_are_refused() -> None:
    skippable = b"\x50\x2a\x4d\x18" + (24).to_bytes(4, "little") + bytes(24)
    good = bytes(wire.encode_body(bytes(24), Encoding.ZSTD))
    for body in (skippable, skippable + good):
        with pytest.raises(BadFrame, match="does not begin with"):
            wire.decode_body(frame_of(24), body)
    with pytest.raises(BadFrame, match="not one whole"):
        wire.decode_body(frame_of(24), good + skippable)


def test_windows_are_bounded_unless_the_frame_is_its_own_window() -> None:
    data = bytes(9 * MIB)
    assert wire.decode_body(frame_of(len(data)), piped(data, window_log=23)) == data
    assert peak_of_refusal(frame_of(len(data)), piped(data, window_log=27)) < len(data) + SLACK_BYTES
    whole = zstandard.ZstdCompressionParameters(compression_level=1, window_log=24)
    body = zstandard.ZstdCompressor(compression_params=whole).compress(data)
    assert wire.decode_body(frame_of(len(data)), body) == data


@pytest.mark.parametrize("name", ["bad-zstd-bomb.bin", "bad-zstd-undeclared-bomb.bin"])
@pytest.mark.parametrize("num_bytes", [24, 2048, 2 * MIB])
def test_bombs_allocate_no_more_than_the_shape(name: str, num_bytes: int) -> None:
    body = (GOLDEN / name).read_bytes()
    assert peak_of_refusal(frame_of(num_bytes), body) < num_bytes + SLACK_BYTES


def test_bodies_longer_than_any_good_one_are_refused_unread() -> None:
    frame = frame_of(24)
    empty_blocks = piped(bytes(24))[:-3] + bytes(3) * wire.max_body_bytes(frame)
    with pytest.raises(BadFrame, match="more than"):
        wire.decode_body(frame, empty_blocks)


RESIDENT_GROWTH = """
import sys
from pathlib import Path
from meshnet import wire
from meshnet.errors import BadFrame

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

session = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
frame = wire.FrameHeaders(1, 1024, 1, (session,), encoding=wire.Encoding.ZSTD)
before = peak_kib()
for name in sys.argv[1:]:
    try:
        wire.decode_body(frame, Path(name).read_bytes())
    except BadFrame:
        continue
    raise SystemExit("accepted " + name)
print(peak_kib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak that Linux keeps for a process")
def test_bombs_do_not_grow_the_process() -> None:
    """tracemalloc does not see what the zstd library allocates for itself; the process's peak does."""
    bombs = map(str, sorted(GOLDEN.glob("bad-zstd-*bomb.bin")))
    command = [sys.executable, "-c", RESIDENT_GROWTH, *bombs]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=GOLDEN.parents[1])
    assert int(ran.stdout) * KIB < wire.MAX_ZSTD_WINDOW_BYTES + MIB


def test_threads_do_not_share_contexts() -> None:
    def round_trip(seed: int) -> bool:
        data = bytes((seed * i) & 0xFF for i in range(64 * KIB))
        frame = frame_of(len(data))
        return all(wire.decode_body(frame, wire.encode_body(data, Encoding.ZSTD)) == data for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(16)))
