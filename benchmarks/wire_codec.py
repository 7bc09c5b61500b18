"""Time of the wire codec on one thread: `python -m benchmarks.wire_codec`.

Bodies are normally distributed bfloat16, which zstd packs about as well as real activations.
Times are the best of five runs.
"""

from __future__ import annotations

import argparse
import array
import random
import timeit
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from meshnet import wire
from meshnet.model import LayerRange
from meshnet.topology import Hop
from meshnet.wire import Encoding, FrameHeaders

SHAPES = {"decode": (1, 1, 576), "batch of 16": (16, 1, 576), "chunk": (1, 128, 576), "large chunk": (1, 128, 16384)}


def activations(num_elements: int, seed: int) -> bytes:
    """Little-endian bfloat16: the upper halves of normally distributed float32."""
    gauss = random.Random(seed).gauss
    floats = array.array("f", (gauss(0.0, 1.0) for _ in range(num_elements))).tobytes()
    halves = bytearray(2 * num_elements)
    halves[0::2], halves[1::2] = floats[2::4], floats[3::4]
    return bytes(halves)


def frame_of(shape: tuple[int, int, int], encoding: Encoding | None) -> FrameHeaders:
    rows, positions, hidden = shape
    return FrameHeaders(
        rows=rows,
        positions=positions,
        hidden=hidden,
        sessions=tuple(f"3f2504e0-4f89-41d3-9a0c-{row:012x}" for row in range(rows)),
        encoding=encoding,
        model="SmolLM2-135M-Instruct",
        cached=tuple(range(1000, 1000 + rows)),
        layers=LayerRange(0, 10),
        route=(Hop("node-b", LayerRange(10, 20)), Hop("node-c", LayerRange(20, 30))),
        returns=1,
    )


def best_us(work: Callable[[], object], seconds: float) -> float:
    """Microseconds a call takes, at best of five runs that share the seconds."""
    timer = timeit.Timer(work)
    once = max(timer.timeit(1), 1e-7)
    calls = max(1, int(seconds / 5 / once))
    return min(timer.repeat(5, calls)) / calls * 1e6


def body_rows(seconds: float, seed: int) -> Table:
    table = Table("frame", "encoding", "bytes", "sent", "encode us", "MB/s", "decode us", "MB/s ", title="bodies")
    for name, shape in SHAPES.items():
        for encoding in (None, Encoding.ZSTD):
            frame = frame_of(shape, encoding)
            data = activations(frame.elements, seed)
            encode, decode, sent = body_times(frame, data, seconds)
            speeds = [f"{frame.num_bytes / us:.0f}" if encoding else "-" for us in (encode, decode)]
            cells = (str(frame.num_bytes), str(sent), f"{encode:.1f}", speeds[0], f"{decode:.1f}", speeds[1])
            table.add_row(f"{name} {shape}", encoding or "raw", *cells)
    return table


def body_times(frame: FrameHeaders, data: bytes, seconds: float) -> tuple[float, float, int]:
    """Microseconds to encode, microseconds to decode, bytes sent."""
    body = wire.encode_body(data, frame.encoding)
    assert wire.decode_body(frame, body) == data
    encode = best_us(lambda: wire.encode_body(data, frame.encoding), seconds)
    decode = best_us(lambda: wire.decode_body(frame, body), seconds)
    return encode, decode, len(body)


def header_rows(seconds: float) -> Table:
    table = Table("frame", "parse us", "format us", title="headers")
    for name, shape in SHAPES.items():
        frame = frame_of(shape, None)
        # What an HTTP server hands over has more fields than ours.
        headers = {"Host": "node-b:7000", "Accept": "*/*", "Content-Length": "1152"} | wire.format_headers(frame)
        assert wire.parse_headers(headers) == frame
        parse = best_us(lambda headers=headers: wire.parse_headers(headers), seconds)  # type: ignore[misc]
        write = best_us(lambda frame=frame: wire.format_headers(frame), seconds)  # type: ignore[misc]
        table.add_row(f"{name} {shape}", f"{parse:.1f}", f"{write:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each figure")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    console.print(body_rows(options.seconds, options.seed))
    console.print(header_rows(options.seconds))


if __name__ == "__main__":
    main()
