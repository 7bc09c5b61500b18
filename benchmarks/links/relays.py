"""A mesh whose nodes reach each other only through relays that hold everything up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.streams import KV_TOKENS, MODEL, specs
from meshnet.addresses import split_address
from meshnet.topology import Topology
from tests.e2e.mesh import Mesh, running_mesh
from tests.faults.behaviour import Behaviour
from tests.faults.proxy import proxy
from tests.smollm2 import smollm2_path

# Nodes are known by the first, where only relays listen, and listen at the second.
RELAYED, DIRECT = "127.0.0.2", "127.0.0.1"


@contextlib.contextmanager
def relayed_mesh(num_nodes: int, delay: float, *options: str, gateway: bool = False) -> Iterator[Mesh]:
    """Frames take `delay` seconds more, in each direction; prompts and tokens, which do not leave the tracker-node, and
    what the tracker is told do not. `options` are those of every node."""
    nodes = specs(num_nodes, "--advertise", RELAYED, *options)
    with (
        running_mesh(
            [f"{MODEL}={smollm2_path()}"], nodes, kv_tokens=KV_TOKENS, tracker_options=["--deploy", MODEL]
        ) as mesh,
        contextlib.ExitStack() as relays,
    ):
        for process in mesh.nodes.values():
            port = split_address(process.match[1])[1]
            relays.enter_context(proxy((RELAYED, port), (DIRECT, port), Behaviour(delay=delay)))
        port = split_address(mesh.nodes["n0"].match[2])[1]
        relays.enter_context(proxy((RELAYED, port), (DIRECT, port)))
        mesh.wait_for(lambda topology: is_proven(topology, num_nodes), "a token has come through all nodes")
        if gateway:
            mesh.start_gateway()
            assert mesh.gateway
            relays.enter_context(mesh.gateway)
        yield mesh


def is_proven(topology: Topology, num_nodes: int) -> bool:
    entry = topology.nodes.get("n0")
    return entry is not None and any(probe.ready and len(probe.hops) == num_nodes for probe in entry.probes)
