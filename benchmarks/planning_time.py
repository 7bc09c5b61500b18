"""How the tracker's planning time grows with the mesh: `python -m benchmarks.planning_time [--nodes 100 1000 10000]`.

For each size: the first plan of a mesh of unequal nodes and 50 models, then single departures and joins on the settled
mesh, each until it is settled again. Nodes obey at once; only the tracker's calls are timed. Prints a table with the
exponent of growth: 1 is linear.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from rich.console import Console
from rich.table import Table

from benchmarks.mesh_churn.catalogue import Catalogue, catalogue, model_ids
from benchmarks.mesh_churn.hardware import NodeSpec, described, mean_vram_bytes
from benchmarks.mesh_churn.sim_node import Order, SimNode
from benchmarks.mesh_churn.trace import Churn, draw_trace
from meshnet.directive import Directive, DirectiveKind, DirectiveState
from meshnet.model import LayerRange
from services.tracker.effects import Effects, Settings
from services.tracker.mesh import Mesh
from services.tracker.remembered import Assignment, Remembered

SETTLE_SECONDS = 8.0


class Obedient:
    """A mesh whose nodes have done each directive before the next thing happens. `seconds`: of calls, by kind."""

    def __init__(self, specs: Sequence[NodeSpec], models: Catalogue) -> None:
        ids = count()
        self.seconds: dict[str, list[float]] = {}
        self._models = models
        self._nodes: dict[str, SimNode] = {}
        self._specs = {spec.node_id: spec for spec in specs}
        self._now = 0.0
        # A node that is expected but absent: nothing is placed until the pause is over, and then all at once.
        absent = {"absent": (Assignment(next(iter(models)), LayerRange(0, 1)),)}
        remembered = Remembered(models={i: sizes.model for i, sizes in models.items()}, nodes=absent)
        settings = Settings(lease_seconds=1e9, suspect_seconds=1e9, settle_seconds=SETTLE_SECONDS)
        self._mesh = Mesh(settings, lambda: f"d{next(ids)}", remembered=remembered)

    def begin(self) -> None:
        for node_id in self._specs:
            self.join(node_id, "first registration")
        self._now = SETTLE_SECONDS
        self._obey(self._timed("first plan", lambda: self._mesh.tick(self._now)), "settling")

    def join(self, node_id: str, what: str = "join") -> None:
        spec = self._specs[node_id]
        node = self._nodes[node_id] = SimNode(spec, 1)
        offered = [self._models[model_id].model.manifest for model_id in spec.files]
        description = described(spec, self._models)
        self._obey(
            self._timed(what, lambda: self._mesh.register(description, node.incarnation, offered, self._now)),
            "finished directive",
        )

    def leave(self, node_id: str) -> None:
        node = self._nodes.pop(node_id)
        self._obey(
            self._timed("departure", lambda: self._mesh.leave(node_id, node.incarnation, self._now)),
            "finished directive",
        )

    def _timed(self, what: str, call: Callable[[], Effects]) -> Effects:
        self._now += 0.001
        started = time.perf_counter()
        effects = call()
        self.seconds.setdefault(what, []).append(time.perf_counter() - started)
        return effects

    def _obey(self, effects: Effects, what: str) -> None:
        waiting = deque(effects.directives)
        while waiting:
            waiting += self._done(waiting.popleft(), what).directives

    def _done(self, directive: Directive, what: str) -> Effects:
        node = self._nodes[directive.node_id]
        order = Order(
            directive.directive_id, directive.kind, directive.model_id, directive.layers, directive.quantization
        )
        held = node.held.setdefault(directive.model_id, {})
        if directive.kind is DirectiveKind.LOAD_SHARD:
            held.update(dict.fromkeys(node.new_layers(order), directive.quantization))
        else:
            for layer in directive.layers.layers:
                held.pop(layer, None)
        state = DirectiveState.READY if directive.kind is DirectiveKind.LOAD_SHARD else DirectiveState.DROPPED
        shards = node.shards(self._models)
        ids = node.node_id, node.incarnation, directive.directive_id
        return self._timed(what, lambda: self._mesh.report(*ids, state, shards, self._now))


def measure(num_nodes: int, num_models: int, repeats: int, seed: int) -> dict[str, list[float]]:
    """Seconds of the calls by kind."""
    models = catalogue(num_models, int(num_nodes * mean_vram_bytes()), 3.0, 524_288)
    still = Churn(hours=0.0)
    specs = list(draw_trace(seed, num_nodes, model_ids(num_models), still).nodes.values())
    mesh = Obedient(specs, models)
    mesh.begin()
    rng = random.Random(seed)
    for spec in rng.choices(specs[1:], k=repeats):
        mesh.leave(spec.node_id)
        mesh.join(spec.node_id)
    return mesh.seconds


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Slope of the line through the logarithms, by least squares."""
    return statistics.linear_regression([math.log(n) for n in sizes], [math.log(s) for s in seconds]).slope


def cells(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    times = sorted(seconds)
    p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
    return " / ".join(f"{1e3 * t:.2f}" for t in (statistics.median(times), p99, times[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 300, 1000, 3000, 10_000])
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=100, help="single departures and joins at each size")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    measured = {}
    for num_nodes in flags.nodes:
        started = time.perf_counter()
        measured[num_nodes] = measure(num_nodes, flags.models, flags.repeats, flags.seed)
        print(f"{num_nodes} nodes: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    table = Table(title=f"ms a call, median / p99 / max; {flags.models} models")
    table.add_column("call")
    for num_nodes in flags.nodes:
        table.add_column(f"{num_nodes} nodes", justify="right")
    table.add_column("growth", justify="right")
    for what in dict.fromkeys(what for seconds in measured.values() for what in seconds):
        times = [seconds.get(what, []) for seconds in measured.values()]
        known = {n: statistics.median(of_size) for n, of_size in zip(measured, times, strict=True) if of_size}
        growth = exponent(list(known), list(known.values())) if len(known) > 1 else None
        table.add_row(what, *map(cells, times), "-" if growth is None else f"n^{growth:.2f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
