"""What a hop costs, without the layers that it runs: `python -m benchmarks.hop`.

Three tables: a decode frame through one to four nodes that answer at once; where the event loop of the node in the
middle spends its time for one; and frames of 4 MiB between two processes, beside a plain copy of the same bytes over
TCP. Nodes are processes with the activation plane of real ones. All on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.hop.copy import copy_times
from benchmarks.hop.server import LAYERS, topology
from meshnet.topology import Hop
from meshnet.wire import FrameHeaders
from services.node.core.compression import Compression
from services.node.peers import Peers

HIDDEN, LARGE = 576, (1, 128, 16384)
NUM_NODES = 4
WARM_UP = 50


@contextlib.contextmanager
def nodes(hidden: int, count: int, profiled: int | None = None) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Addresses of nodes by id. What the profiled one wrote is in the list afterwards."""
    written: list[str] = []
    children = []
    try:
        for index in range(count):
            command = [sys.executable, "-m", "benchmarks.hop.server", f"n{index}", str(hidden)]
            command += ["--profile"] * (index == profiled)
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        addresses = {}
        for index, child in enumerate(children):
            assert child.stdout
            addresses[f"n{index}"] = child.stdout.readline().split()[1]
        for child in children:
            assert child.stdin
            child.stdin.write(json.dumps(addresses) + "\n")
            child.stdin.flush()
        for child in children:
            assert child.stdout
            child.stdout.readline()
        yield addresses, written
        for index, child in enumerate(children):
            output, _ = child.communicate(timeout=30)
            if index == profiled:
                written.append(output)
    finally:
        for child in children:
            child.kill()
            child.wait()


async def frame_times(
    addresses: dict[str, str], shape: tuple[int, int, int], num_hops: int, repeats: int, returns: int
) -> list[float]:
    """Seconds from sending a frame until its answer is here, through the first so many nodes."""
    rows, positions, hidden = shape
    made = topology(addresses, hidden)
    peers = Peers(lambda: made, Compression.OFF, 60.0)
    hops = tuple(Hop(f"n{index}", LAYERS) for index in range(num_hops))
    frame = FrameHeaders(
        rows, positions, hidden, tuple(str(uuid.uuid4()) for _ in range(rows)), model="m", layers=LAYERS,
        cached=(0,) * rows, returns=returns, route=hops[1:],
    )  # fmt: skip
    body, times = bytes(frame.num_bytes), []
    try:
        for _ in range(repeats):
            started = time.perf_counter()
            await peers.send(hops[0], frame, body)
            times.append(time.perf_counter() - started)
    finally:
        await peers.close()
    return times[min(WARM_UP, len(times) // 3) :]


def chain_table(repeats: int) -> Table:
    table = Table("frame", "hops", "median, us", "best, us", "one more, us", title="A decode frame, there and back")
    with nodes(HIDDEN, NUM_NODES) as (addresses, _):
        for rows in (1, 16):
            # In turn, so that what else the machine does is shared by all.
            times: dict[int, list[float]] = {hops: [] for hops in range(1, NUM_NODES + 1)}
            for _ in range(4):
                for hops, taken in times.items():
                    taken += asyncio.run(frame_times(addresses, (rows, 1, HIDDEN), hops, repeats // 4 + WARM_UP, 1))
            before = 0.0
            for hops, taken in times.items():
                median = 1e6 * statistics.median(taken)
                more = f"{median - before:.0f}" if before else ""
                table.add_row(f"{rows},1,{HIDDEN}", str(hops), f"{median:.0f}", f"{1e6 * min(taken):.0f}", more)
                before = median
    return table


def parts_table(repeats: int) -> Table:
    table = Table("part", "us a frame", title="The event loop of a node in the middle, under a profiler")
    with nodes(HIDDEN, 3, profiled=1) as (addresses, written):
        asyncio.run(frame_times(addresses, (1, 1, HIDDEN), 3, repeats, 1))
    parts = json.loads(written[0].splitlines()[-1])
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if part != "waiting":
            table.add_row(part, f"{1e6 * seconds / repeats:.0f}")
    return table


def large_table(repeats: int) -> Table:
    size = 2 * LARGE[0] * LARGE[1] * LARGE[2]
    command = [sys.executable, "-m", "benchmarks.hop.copy", str(size)]
    frames, copies = [], []
    with nodes(LARGE[2], 1) as (addresses, _):
        for _ in range(4):
            frames += asyncio.run(frame_times(addresses, LARGE, 1, repeats, 0))
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
                assert receiver.stdout
                copies += copy_times(int(receiver.stdout.readline()), bytes(size), repeats)[repeats // 3 :]
    table = Table("", "median, ms", "MB/s", "best, ms", "MB/s ", title=f"{size / 2**20:.0f} MiB between two processes")
    for name, times in (("plain copy over TCP", copies), (f"frame {','.join(map(str, LARGE))}", frames)):
        median, best = statistics.median(times), min(times)
        rates = [f"{size / 1e6 / seconds:.0f}" for seconds in (median, best)]
        table.add_row(name, f"{1e3 * median:.2f}", rates[0], f"{1e3 * best:.2f}", rates[1])
    shares = statistics.median(copies) / statistics.median(frames), min(copies) / min(frames)
    table.add_row("share of the copy's rate", "", f"{shares[0]:.2f}", "", f"{shares[1]:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1000, help="Decode frames of each kind; large ones a twentieth.")
    arguments = parser.parse_args()
    console = Console()
    console.print(chain_table(arguments.repeats))
    console.print(parts_table(arguments.repeats))
    console.print(large_table(max(arguments.repeats // 20, 6)))


if __name__ == "__main__":
    main()
