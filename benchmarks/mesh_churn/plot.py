"""The picture: coverage, throughput and bytes over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.mesh_churn.summary import Run


def save(runs: Sequence[Run], path: Path, title: str) -> None:
    """Writes a PNG or SVG, by the name. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    figure.suptitle(title)
    (coverage, throughput), (moved, refills) = axes
    for run in runs:
        hours = [(s.at - run.start) / 3600 for s in run.tally.samples]
        coverage.plot(hours, [100 * s.covered_share for s in run.tally.samples], label=run.name, drawstyle="steps-post")
        weakest = [min(s.bottlenecks.values()) for s in run.tally.samples]
        throughput.plot(hours, weakest, label=run.name)
        moved.plot(hours, [s.loaded_bytes / 1e12 for s in run.tally.samples], label=run.name)
        refills.step([0, *run.refills()], range(len(run.refills()) + 1), where="post", label=run.name)
    lost = runs[0].tally.samples
    moved.plot(
        [(s.at - runs[0].start) / 3600 for s in lost],
        [s.lost_bytes / 1e12 for s in lost],
        "k--",
        label=f"lost with departures ({runs[0].name})",
    )
    _label(coverage, "models covered, %", "hours of churn")
    _label(throughput, "tokens/s of the weakest model's bottleneck", "hours of churn")
    _label(moved, "loaded, TB", "hours of churn")
    _label(refills, "gaps that were filled within", "seconds")
    refills.set_xscale("symlog")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label(axes, y: str, x: str) -> None:  # type: ignore[no-untyped-def]
    axes.set_ylabel(y)
    axes.set_xlabel(x)
    axes.grid(alpha=0.3)
    axes.legend()
