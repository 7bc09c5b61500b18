"""The figures of one run, and the table of several."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.mesh_churn.tally import Tally
from benchmarks.mesh_churn.truth import Gap


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy on one trace. `start` and `end` bound what is measured; `plan_seconds` is real time of calls by
    kind, only for the tracker."""

    name: str
    start: float
    end: float
    model_ids: tuple[str, ...]
    tally: Tally
    gaps: tuple[Gap, ...]
    plan_seconds: dict[str, list[float]]
    wall_seconds: float

    @property
    def hours(self) -> float:
        return (self.end - self.start) / 3600

    def coverage(self) -> dict[str, float]:
        """Share of time that each model was fully covered."""
        lost = dict.fromkeys(self.model_ids, 0.0)
        for gap in self.gaps:
            lost[gap.model_id] += max(0.0, gap.seconds(self.end) - max(0.0, self.start - gap.start))
        return {model_id: 1 - seconds / (self.end - self.start) for model_id, seconds in lost.items()}

    def refills(self) -> list[float]:
        """Seconds of the gaps that opened while it was measured and were closed."""
        return sorted(gap.seconds(self.end) for gap in self.gaps if gap.start >= self.start and gap.end is not None)

    def throughput(self) -> dict[str, float]:
        """Mean over time of each model's bottleneck, in tokens a second; 0 while it is not covered."""
        return {i: statistics.fmean(s.bottlenecks[i] for s in self.tally.samples) for i in self.model_ids}


def table(runs: Sequence[Run], title: str) -> Table:
    result = Table(title=title)
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")
    for name, figure in ROWS.items():
        result.add_row(name, *(figure(run) for run in runs))
    return result


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f} %" if whole else "-"


def _times(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _quantiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.0f} / {max(seconds):.0f}"


def _geometric_mean(rates: Iterable[float]) -> float:
    """Models differ a hundredfold in tokens a second. One that is never covered counts as a thousandth of a token."""
    return statistics.geometric_mean(max(rate, 1e-3) for rate in rates)


def _mean_hops(run: Run) -> str:
    return f"{statistics.fmean(r.hops for r in run.tally.routes):.2f}" if run.tally.routes else "-"


def _route_rate(run: Run) -> str:
    return f"{statistics.fmean(r.tokens_per_second for r in run.tally.routes):.1f}" if run.tally.routes else "-"


def _open(run: Run) -> str:
    return str(sum(gap.end is None for gap in run.gaps))


ROWS: dict[str, Callable[[Run], str]] = {
    "time covered, mean of models": lambda r: _share(statistics.fmean(r.coverage().values()), 1),
    "time covered, worst model": lambda r: _share(min(r.coverage().values()), 1),
    "models never uncovered": lambda r: str(sum(share == 1.0 for share in r.coverage().values())),
    "gaps opened": lambda r: str(sum(gap.start >= r.start for gap in r.gaps)),
    "  by a drop, not a departure": lambda r: str(sum(gap.start >= r.start and gap.by_drop for gap in r.gaps)),
    "  still open at the end": _open,
    "seconds to refill, median / max": lambda r: _quantiles(r.refills()),
    "joins": lambda r: str(r.tally.joins),
    "departures": lambda r: str(r.tally.departures),
    "GB lost with a departure": lambda r: _gigabytes(r.tally.lost_bytes / max(1, r.tally.departures)),
    "GB loaded for a departure": lambda r: _gigabytes(r.tally.loaded_bytes / max(1, r.tally.departures)),
    "loaded / lost": lambda r: _times(r.tally.loaded_bytes, r.tally.lost_bytes),
    "GB lost as last replicas": lambda r: _gigabytes(r.tally.last_lost_bytes),
    "GB loaded into gaps": lambda r: _gigabytes(r.tally.refilled_bytes),
    "GB dropped": lambda r: _gigabytes(r.tally.dropped_bytes),
    "GB loaded twice by a process": lambda r: _gigabytes(r.tally.thrash_bytes),
    "orders a node and hour": lambda r: f"{3600 * sum(r.tally.orders.values()) / max(1.0, r.tally.node_seconds):.2f}",
    "lent memory in use": lambda r: _share(statistics.fmean(s.room_used for s in r.tally.samples), 1),
    "bottleneck tokens/s, geometric mean": lambda r: f"{_geometric_mean(r.throughput().values()):.0f}",
    "bottleneck tokens/s, weakest": lambda r: f"{min(r.throughput().values()):.0f}",
    "bottleneck / mean layer": lambda r: f"{statistics.fmean(s.evenness for s in r.tally.samples):.2f}",
    "hops of a route": _mean_hops,
    "tokens/s of its slowest hop": _route_rate,
    "wall seconds of the run": lambda r: f"{r.wall_seconds:.0f}",
}


def plan_table(run: Run) -> Table:
    """Real time of the tracker's calls."""
    result = Table("call", "calls", "median ms", "p99 ms", "max ms", "sum s", title="time in the tracker")
    for what, seconds in sorted(run.plan_seconds.items()):
        times = sorted(seconds)
        p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
        cells = (f"{1e3 * t:.2f}" for t in (statistics.median(times), p99, times[-1]))
        result.add_row(what, str(len(times)), *cells, f"{sum(times):.1f}")
    return result


def orders_table(run: Run) -> Table:
    """What the tracker ordered, and what came of it."""
    result = Table("order", "count", title=f"orders of {run.name!r}, and their ends")
    for what, number in run.tally.orders.most_common(20):
        result.add_row(what, str(number))
    result.add_section()
    for what, number in run.tally.outcomes.most_common():
        result.add_row(what, str(number))
    return result
