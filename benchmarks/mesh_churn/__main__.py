"""A mesh under churn, simulated: `python -m benchmarks.mesh_churn [--nodes 10000 --models 50 --hours 24]`.

The tracker's own code beside random and weakest-window choice, on the same trace: coverage, moves, throughput. Time is
virtual; what is measured begins after a warm-up of half an hour. Prints tables, saves a plot (needs matplotlib).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks.mesh_churn import plot, summary
from benchmarks.mesh_churn.alone import RandomChoice
from benchmarks.mesh_churn.catalogue import Catalogue, catalogue, model_ids
from benchmarks.mesh_churn.hardware import mean_vram_bytes
from benchmarks.mesh_churn.ours import Ours
from benchmarks.mesh_churn.sampler import watch
from benchmarks.mesh_churn.strategy import Strategy
from benchmarks.mesh_churn.trace import Churn, Trace, draw_trace
from benchmarks.mesh_churn.weakest import WeakestChoice
from benchmarks.mesh_churn.world import World

STRATEGIES: dict[str, Callable[[World, int], Strategy]] = {
    "ours": lambda world, seed: Ours(world),
    "random": RandomChoice,
    "weakest": WeakestChoice,
    "moving": lambda world, seed: WeakestChoice(world, seed, check_seconds=1200.0),
}


def run(name: str, trace: Trace, models: Catalogue, tick_seconds: float) -> summary.Run:
    """One strategy on the trace, with progress on stderr."""
    world = World(trace, models, tick_seconds=tick_seconds)
    strategy = STRATEGIES[name](world, trace.seed)
    world.start(strategy)
    watch(world)
    started = time.perf_counter()
    end = trace.churn.end
    for step in range(1, 101):
        world.clock.run_until(end * step / 100)
        seconds = time.perf_counter() - started
        covered = sum(map(world.truth.covered, models))
        state = f"{len(world.nodes)} nodes, {covered}/{len(models)} models covered, {seconds:.0f} s"
        print(f"\r{name}: {step} %, {state}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return summary.Run(
        name=strategy.name,
        start=trace.churn.warmup_seconds,
        end=end,
        model_ids=tuple(models),
        tally=world.tally,
        gaps=tuple(world.truth.gaps()),
        plan_seconds=dict(strategy.seconds) if isinstance(strategy, Ours) else {},
        wall_seconds=time.perf_counter() - started,
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--hours", type=float, default=2.0, help="of churn, after the warm-up")
    parser.add_argument("--churn", type=float, default=0.2, help="share of the nodes that depart in an hour")
    parser.add_argument("--copies", type=float, default=3.0, help="copies of all models that the mesh has room for")
    parser.add_argument("--files", type=int, default=5, help="models whose files a node has; 0: all")
    parser.add_argument("--most-kv-tokens", type=int, default=524_288, help="KV cache room of a model, at most")
    parser.add_argument("--tick", type=float, default=3.0, help="seconds between two heartbeats")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=Path("mesh_churn.png"), help="PNG or SVG to write")
    return parser.parse_args()


def main() -> None:
    flags = options()
    churn = Churn(hours=flags.hours, hourly=flags.churn, files=flags.files)
    capacity = int(flags.nodes * mean_vram_bytes())
    models = catalogue(flags.models, capacity, flags.copies, flags.most_kv_tokens)
    trace = draw_trace(flags.seed, flags.nodes, model_ids(flags.models), churn)
    runs = [run(name, trace, models, flags.tick) for name in flags.strategies]
    kv_tokens = next(iter(models.values())).model.kv_tokens
    title = (
        f"{flags.nodes} nodes, {flags.models} models with KV room for {kv_tokens} tokens, "
        f"{flags.hours:g} h at {100 * flags.churn:g} % churn an hour, seed {flags.seed}"
    )
    console = Console(width=120)
    console.print(summary.table(runs, title))
    for result in runs:
        if result.plan_seconds:
            console.print(summary.plan_table(result))
            console.print(summary.orders_table(result))
    try:
        plot.save(runs, flags.plot, title)
        console.print(f"plot: {flags.plot}")
    except ImportError:
        console.print("no plot: pip install 'meshnet[benchmarks]'")


if __name__ == "__main__":
    main()
