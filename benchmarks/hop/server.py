"""A node's activation plane in a process of its own, with an executor that answers zeros at once.

    python -m benchmarks.hop.server NODE_ID HIDDEN [--profile]

Writes `listening HOST:PORT`, then reads one line, `{"node_id": "host:port", ...}`, writes `ready`, and serves until its
input ends.
With --profile it writes then how long it spent where, as one JSON line.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import pstats
import sys
from collections import defaultdict
from dataclasses import replace

from meshnet.model import LayerRange, Quantization
from meshnet.topology import Topology
from services.node.config import NodeConfig
from services.node.core.work import ShardSpec
from services.node.stub import StubExecutor
from tests import models
from tests.services.node.shells import close, make_shell

NUM_LAYERS = 16
KV_TOKENS = 1 << 16
LAYERS = LayerRange(0, NUM_LAYERS)
# Which code belongs to which part, by what its file's name contains; the first that fits.
PARTS = (
    ("frame headers and bodies", ("meshnet/wire",)),
    ("HTTP for frames", ("services/node/http/",)),
    ("this node: place, order, steps", ("services/node", "meshnet/")),
    ("aiohttp and its parts", ("aiohttp", "multidict", "yarl", "http_parser", "frozenlist", "aiosignal")),
    ("event loop", ("asyncio", "selectors", "threading", "concurrent")),
)
KERNEL = ("method 'poll'", "method 'recv", "method 'send", "method 'select'", "method 'acquire'")


def topology(addresses: dict[str, str], hidden: int) -> Topology:
    """All layers on each of the nodes."""
    nodes = [replace(models.node(n, (0, NUM_LAYERS)), forward_address=address) for n, address in addresses.items()]
    made = models.topology(*nodes, num_layers=NUM_LAYERS)
    manifest = models.manifest("m", NUM_LAYERS, hidden)
    return replace(made, models={"m": replace(made.models["m"], manifest=manifest)})


async def serve(node_id: str, hidden: int) -> None:
    snapshot = [Topology()]
    config = NodeConfig(node_id, "", "", "", "", 0, Quantization.BFLOAT16)
    spec = ShardSpec(models.manifest("m", NUM_LAYERS, hidden), LAYERS, Quantization.BFLOAT16, KV_TOKENS)
    executor = StubExecutor()
    executor.attach(executor.load(spec, lambda done, total: None))
    shell = make_shell(config, spec, snapshot, executor)
    print(f"listening {await shell.server.start('127.0.0.1:0')}", flush=True)
    snapshot[0] = topology(json.loads(await asyncio.to_thread(sys.stdin.readline)), hidden)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await close(shell)


def by_part(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds of the event loop's thread in each part."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for (file, _, function), (_, _, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file == "~" and any(name in function for name in KERNEL):
            part = "waiting" if "poll" in function or "acquire" in function else "kernel: send and receive"
        else:
            part = next((name for name, marks in PARTS if any(mark in file for mark in marks)), "the rest of Python")
        seconds[part] += own
    return dict(seconds)


def main() -> None:
    node_id, hidden = sys.argv[1], int(sys.argv[2])
    if "--profile" not in sys.argv:
        asyncio.run(serve(node_id, hidden))
        return
    profile = cProfile.Profile()
    profile.runcall(asyncio.run, serve(node_id, hidden))
    print(json.dumps(by_part(profile)), flush=True)


if __name__ == "__main__":
    main()
