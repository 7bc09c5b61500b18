"""meshnet beside llama.cpp, vLLM and transformers on this machine: streams, prompts, the first token, by turns.

    benchmarks/peers/install.sh ~/peers            # once: builds llama.cpp, installs vLLM, half an hour
    python -m benchmarks.peers --peers ~/peers [--rounds 2] [--only meshnet,llama] [--plot peers.png]

SmolLM2-135M in bfloat16. The machine has other things to do, so that only ratios within one run count: each round
starts every system anew and measures it, and of the rounds the best figure of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.peers.alone import Alone
from benchmarks.peers.load import Figures, measure
from benchmarks.peers.systems import System, llama_alone, llama_rpc, meshnet, vllm

REFERENCE = "meshnet, 2 nodes"


def systems(peers: Path | None, only: list[str]) -> list[System | Alone]:
    found: list[System | Alone] = [meshnet(1), meshnet(2), meshnet(4), meshnet(2, speculate=True), Alone()]
    if peers is not None:
        binaries, gguf = peers / "llama.cpp" / "build" / "bin", peers / "smollm2-bf16.gguf"
        found += [llama_rpc(binaries, gguf), llama_alone(binaries, gguf)]
        python, folder = peers / "vllm" / "bin" / "python", peers / "smollm2"
        found += [vllm(python, folder, 2), vllm(python, folder, 1)]
    return [system for system in found if not only or any(part in system.name for part in only)]


def run(system: System | Alone, counts: list[int], lengths: list[int], seed: int) -> Figures:
    if isinstance(system, Alone):
        return system.measure(counts, lengths, seed)
    with system.start(max(counts)) as endpoint:
        return asyncio.run(measure(endpoint, counts, lengths, seed))


def best(figures: list[Figures]) -> Figures:
    """Of several rounds the best of each figure: other work on the machine can only make them worse."""
    return Figures(
        rates={n: max(each.rates[n] for each in figures) for n in figures[0].rates},
        firsts={n: min(each.firsts[n] for each in figures) for n in figures[0].firsts},
        gaps={n: min(each.gaps[n] for each in figures) for n in figures[0].gaps},
        prefills={n: max(each.prefills[n] for each in figures) for n in figures[0].prefills},
    )


def table(results: dict[str, Figures]) -> Table:
    some = next(iter(results.values()))
    shown = Table(title=f"SmolLM2-135M, bfloat16, {os.cpu_count()} cores; best of each, tokens/s and ms")
    shown.add_column("system")
    for count in some.rates:
        shown.add_column(f"{count} stream{'s' * (count > 1)}", justify="right")
    for length in some.prefills:
        shown.add_column(f"prompt {length}", justify="right")
    for count in some.firsts:
        shown.add_column(f"first at {count}", justify="right")
        shown.add_column(f"between p50/p95 at {count}", justify="right")
    for name, figures in results.items():
        cells = [f"{rate:.1f}" for rate in (*figures.rates.values(), *figures.prefills.values())]
        for count, first in figures.firsts.items():
            cells += [f"{first:.0f}", "{:.0f}/{:.0f}".format(*figures.gaps[count])]
        shown.add_row(name, *cells)
    return shown


def ratios(results: dict[str, Figures]) -> Table | None:
    """How many times the others' rates the reference's are."""
    if REFERENCE not in results:
        return None
    ours = results[REFERENCE]
    shown = Table(title=f"{REFERENCE}, against")
    shown.add_column("system")
    for name in (*(f"{n} streams" for n in ours.rates), *(f"prompt {n}" for n in ours.prefills)):
        shown.add_column(name, justify="right")
    for name, figures in results.items():
        cells = [f"{ours.rates[n] / rate:.2f}" for n, rate in figures.rates.items()]
        cells += [f"{ours.prefills[n] / rate:.2f}" for n, rate in figures.prefills.items()]
        shown.add_row(name, *cells)
    return shown


def plot(results: dict[str, Figures], path: Path) -> None:
    from matplotlib import pyplot  # an optional dependency, and slow to import

    figure, axis = pyplot.subplots(figsize=(8, 5))
    for name, figures in results.items():
        axis.plot(list(figures.rates), list(figures.rates.values()), marker="o", label=name)
    axis.set(xlabel="streams", ylabel="output tokens/s", xscale="log", title="128 tokens in, 64 out")
    axis.set_xticks(list(next(iter(results.values())).rates), minor=False)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="Where install.sh has put the others. Without: meshnet alone.")
    parser.add_argument("--rounds", type=int, default=2, help="How often each system has its turn.")
    parser.add_argument("--only", default="", help="Parts of names of systems, with commas.")
    parser.add_argument("--streams", default="1,4,16,64", help="Numbers of streams, with commas.")
    parser.add_argument("--prompts", default="512,2048", help="Lengths of prompts, with commas.")
    parser.add_argument("--plot", type=Path, help="Where to draw rates by streams, as PNG.")
    arguments = parser.parse_args()
    counts, lengths = ([int(part) for part in text.split(",")] for text in (arguments.streams, arguments.prompts))
    chosen = systems(arguments.peers, [part for part in arguments.only.split(",") if part])
    console = Console(width=max(Console().width, 180))
    measured: defaultdict[str, list[Figures]] = defaultdict(list)
    for number in range(arguments.rounds):
        for system in chosen:
            figures = run(system, counts, lengths, seed=number)
            measured[system.name].append(figures)
            console.print(f"round {number + 1}: {system.name}: {figures}", style="dim")
    results = {name: best(figures) for name, figures in measured.items()}
    console.print(table(results))
    if shown := ratios(results):
        console.print(shown)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
