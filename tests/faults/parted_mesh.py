"""Run by test_partition: a mesh on hosts of their own, two of which are parted while the tracker hears both."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.links.namespaces import SWITCH_ADDRESS, Host, hosts, isolate
from meshnet.topology import Topology
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.streams import streams
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama
from tests.faults.partition import deaf, parted
from tests.parity import Reference, check_emitted
from tests.processes import wait_until

MODEL = "tiny"
NEW_TOKENS = 300
PROMPT = [7, 11, 13]
TOLERATED_STEPS = 8.0


def served_twice(topology: Topology) -> bool:
    """The last four layers; the first two are the entry node's."""
    held = [layer for node in topology.nodes.values() for layer in node.layers(MODEL)]
    return all(held.count(layer) == (1 if layer < 2 else 2) for layer in range(6))


def in_use(mesh: Mesh) -> str:
    """The hop behind the entry node."""
    serving = [i for i, node in mesh.topology().nodes.items() if 2 in node.layers(MODEL)]
    found: list[str] = []

    def look() -> bool:
        found[:] = [node_id for node_id in serving if mesh.health(node_id)["sessions"]]
        return bool(found)

    wait_until(look, 30, "a session is there", mesh.logs)
    return found[0]


def check(mesh: Mesh, reference: Reference, by_id: dict[str, Host], *, both_ways: bool) -> None:
    with streams(mesh.gateway_url, MODEL, [PROMPT], NEW_TOKENS) as clients:
        clients.wait_until_all_run()
        lost = by_id[in_use(mesh)]
        entry = by_id["a"]
        with parted(entry, lost) if both_ways else deaf(entry, lost):
            (tokens,) = clients.tokens()
    check_emitted(reference.logits([*PROMPT, *tokens[:-1]])[len(PROMPT) - 1 :], tokens, TOLERATED_STEPS)


def main() -> None:
    isolate("tests.faults.parted_mesh")
    weights = save_tiny_llama(Path(sys.argv[1]) / "tiny", vocabulary=True)
    with hosts(5, None) as made:
        by_id = dict(zip("abcde", made, strict=True))
        specs = [
            replace(
                NodeSpec(node_id, room_for(2), tracker_node=node_id == "a"),
                prefix=host.prefix,
                options=("--listen", f"{host.address}:0", "--insecure"),
            )
            for node_id, host in by_id.items()
        ]
        with running_mesh(
            [f"{MODEL}={weights}"], specs, kv_tokens=KV_TOKENS, gateway=True,
            tracker_options=("--deploy", MODEL, "--listen", f"{SWITCH_ADDRESS}:0", "--insecure"),
        ) as mesh:  # fmt: skip
            mesh.wait_for(served_twice, "the last layers are served twice")
            for both_ways in (False, True):
                check(mesh, Reference(weights), by_id, both_ways=both_ways)


if __name__ == "__main__":
    main()
