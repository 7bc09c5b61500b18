"""Meshes of two and four nodes over slow links: tokens a second, and a prompt of 512 tokens.

    python -m benchmarks.links [--nodes 2,4] [--links local,1gbit,100mbit,20ms]

SmolLM2-135M in bfloat16 on nodes of one thread each, no speculation. Each node has a network namespace, and its card
the rate that is named, by tc (needs root); tracker and gateway are at the switch. Delays are by relays, on loopback and
in each direction, since many kernels have no netem: all that nodes tell each other takes so long more.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.estimate_error.meshes import LONG_PROMPT, SESSIONS, measure
from benchmarks.links import namespaces
from benchmarks.links.relays import is_proven, relayed_mesh
from benchmarks.streams import KV_TOKENS, MODEL, specs
from tests.e2e.mesh import Mesh, running_mesh
from tests.smollm2 import smollm2_path

# What is measured are the links, and what a model makes of random prompts is easily guessed.
OPTIONS = ("--speculate", "off")


@dataclass(frozen=True)
class Link:
    """`rate` in bit/s, `delay` in seconds, in each direction; None and 0: what the machine does by itself."""

    name: str
    rate: float | None = None
    delay: float = 0.0


def parse_link(text: str) -> Link:
    """`local`, or a rate (`100mbit`, `1gbit`), or a delay (`20ms`)."""
    found = re.fullmatch(r"(?P<number>[0-9.]+)(?P<unit>mbit|gbit|ms)", text)
    if text == "local":
        return Link(text)
    if not found:
        raise SystemExit(f"{text!r} is not local, nor like 100mbit, 1gbit or 20ms")
    number = float(found["number"])
    if found["unit"] == "ms":
        return Link(text, delay=number / 1000)
    return Link(text, rate=number * {"mbit": 1e6, "gbit": 1e9}[found["unit"]])


@contextlib.contextmanager
def mesh_over(link: Link, num_nodes: int) -> Iterator[Mesh]:
    if link.delay:
        with relayed_mesh(num_nodes, link.delay, *OPTIONS, gateway=True) as mesh:
            yield mesh
        return
    with namespaces.hosts(num_nodes, link.rate) as hosts:
        nodes = [
            replace(spec, prefix=host.prefix, options=(*spec.options, "--listen", f"{host.address}:0", "--insecure"))
            for spec, host in zip(specs(num_nodes, *OPTIONS), hosts, strict=True)
        ]
        with running_mesh(
            [f"{MODEL}={smollm2_path()}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True,
            tracker_options=["--listen", f"{namespaces.SWITCH_ADDRESS}:0", "--insecure"],
        ) as mesh:  # fmt: skip
            mesh.wait_for(lambda topology: is_proven(topology, num_nodes), "a token has come through all nodes")
            yield mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,4", help="Numbers of nodes, with commas.")
    parser.add_argument("--links", default="local,1gbit,100mbit,20ms", help="Rates or delays, with commas.")
    parser.add_argument("--repeats", type=int, default=1, help="The median of so many runs counts.")
    arguments = parser.parse_args()
    links = [parse_link(text) for text in arguments.links.split(",")]
    namespaces.isolate("benchmarks.links")
    table = Table(
        "nodes", "link", "1 stream, tokens/s", f"{SESSIONS} streams", f"prompt of {LONG_PROMPT}, tokens/s",
        title="SmolLM2-135M over slow links",
    )  # fmt: skip
    console = Console()
    for num_nodes in map(int, arguments.nodes.split(",")):
        for link in links:
            with mesh_over(link, num_nodes) as mesh:
                found = measure(mesh, arguments.repeats)
            console.print(f"{num_nodes} nodes, {link.name}: {found}", style="dim")
            prompt = LONG_PROMPT / found.first_token
            table.add_row(str(num_nodes), link.name, f"{found.single:.1f}", f"{found.many:.1f}", f"{prompt:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
