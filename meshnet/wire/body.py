"""Frame bodies: raw bytes as they are, or one zstd frame. The shape bounds every allocation."""

from __future__ import annotations

import threading
from typing import Final, TypeAlias

import zstandard

from meshnet.errors import BadFrame
from meshnet.wire.frame import Encoding, FrameHeaders

Buffer: TypeAlias = bytes | bytearray | memoryview

# Level 1 is the only one that keeps up with a fast link; see docs/adr/0001-wire-format.md.
ZSTD_LEVEL: Final = 1
# What RFC 8878 asks every decoder to support, and what `zstd -19` needs. Level 1 uses 512 KiB.
MAX_ZSTD_WINDOW_BYTES: Final = 8 << 20


class _Codecs(threading.local):
    """Contexts are not thread-safe, and making one costs more than a small frame does: one pair a thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)


_codecs = _Codecs()


def max_body_bytes(frame: FrameHeaders) -> int:
    """The most bytes that an acceptable body of this frame has as sent."""
    size = frame.num_bytes
    return size if frame.encoding is None else max_zstd_bytes(size)


def max_zstd_bytes(size: int) -> int:
    """The most bytes that so many bytes take as a zstd frame, if they are incompressible: 1/256 more covers the headers
    of even the smallest blocks (3 bytes a KiB). Nothing stays nothing."""
    return size + (size >> 8) + 1024 if size else 0


def encode_body(data: Buffer, encoding: Encoding | None) -> Buffer:
    """The body as sent: `data` itself if raw, else one zstd frame that declares its size. Nothing stays nothing."""
    if encoding is None or not memoryview(data).nbytes:
        return data
    return _codecs.compressor.compress(_flat(data))


def decode_body(frame: FrameHeaders, body: Buffer) -> memoryview:
    """The `frame.num_bytes` bytes of the tensor: a view of `body` itself if raw, else of the inflated bytes.

    A frame without elements has an empty body, whatever its encoding. Raises BadFrame, having allocated no more
    than `frame.num_bytes` and a window of MAX_ZSTD_WINDOW_BYTES.
    """
    view = _flat(body)
    if frame.encoding is Encoding.ZSTD and frame.num_bytes:
        view = memoryview(_inflate(frame, view))
    if len(view) != frame.num_bytes:
        raise BadFrame(f"the body has {len(view)} bytes, {_expected(frame)}")
    return view


def _inflate(frame: FrameHeaders, body: memoryview) -> bytes:
    if len(body) > max_body_bytes(frame):
        raise BadFrame(f"the zstd body has {len(body)} bytes, more than {max_body_bytes(frame)}; {_expected(frame)}")
    # A skippable frame is legal zstd and holds nothing.
    if body[:4] != zstandard.FRAME_HEADER:
        raise BadFrame("the body does not begin with a zstd frame")
    try:
        declared = zstandard.get_frame_parameters(body).content_size
        # Before inflating: the library allocates what a frame declares, whatever limit it is given.
        if declared not in (frame.num_bytes, zstandard.CONTENTSIZE_UNKNOWN):
            raise BadFrame(f"the zstd frame declares {declared} bytes, {_expected(frame)}")
        return _codecs.decompressor.decompress(body, max_output_size=frame.num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadFrame(f"the body is not one whole zstd frame ({error}), {_expected(frame)}") from error


def _flat(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _expected(frame: FrameHeaders) -> str:
    return f"shape {frame.rows},{frame.positions},{frame.hidden} takes {frame.num_bytes}"
