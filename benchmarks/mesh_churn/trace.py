"""What happens to a mesh, drawn from a seed before anything is placed: the same for every strategy."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.mesh_churn.hardware import NodeSpec, draw_node


class EventKind(StrEnum):
    """`DRAINS` is the announcement of a `LEAVES`; a node that is `SILENT` runs on, but nobody hears it."""

    JOINS = "joins"
    DRAINS = "drains"
    LEAVES = "leaves"
    DIES = "dies"
    SILENT = "silent"


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """Times in seconds from the start; `seconds`: how long a silence lasts."""

    at: float
    node_id: str
    kind: EventKind
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Churn:
    """Rates and probabilities of a trace.

    `hourly`: share of the nodes that depart in an hour; of those departures, `site_share` go with a whole site,
    `clean_share` leave (half of these are drained before) and the rest die. Nobody departs before `warmup_seconds`.
    Each is replaced, by itself (`rejoin_share`) or by a new node. `silences_hourly` are a node's in an hour.
    """

    hours: float = 2.0
    warmup_seconds: float = 1800.0
    hourly: float = 0.2
    site_share: float = 0.15
    clean_share: float = 0.3
    rejoin_share: float = 0.5
    mean_absence_seconds: float = 600.0
    drain_seconds: float = 180.0
    silences_hourly: float = 0.1
    overstated: float = 0.03
    files: int = 5

    @property
    def end(self) -> float:
        return self.warmup_seconds + 3600 * self.hours


@dataclass(frozen=True, slots=True)
class Trace:
    seed: int
    churn: Churn
    nodes: dict[str, NodeSpec]
    events: tuple[Event, ...]


def draw_trace(seed: int, num_nodes: int, model_ids: Sequence[str], churn: Churn) -> Trace:
    return _Drawing(seed, num_nodes, model_ids, churn).trace()


class _Drawing:
    """A population that knows nothing of layers."""

    def __init__(self, seed: int, num_nodes: int, model_ids: Sequence[str], churn: Churn) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._model_ids = model_ids
        self._churn = churn
        self._nodes: dict[str, NodeSpec] = {}
        self._events: list[Event] = []
        self._up: list[str] = []
        self._sites: dict[str, list[str]] = {}
        self._returns: list[tuple[float, str]] = []
        self._num_nodes = num_nodes

    def trace(self) -> Trace:
        self._populate()
        churn, rng = self._churn, self._rng
        single = self._num_nodes * churn.hourly / 3600 * (1 - churn.site_share)
        mean_site = len(self._nodes) / len(self._sites)
        site = self._num_nodes * churn.hourly / 3600 * churn.site_share / mean_site
        silence = self._num_nodes * churn.silences_hourly / 3600
        now = churn.warmup_seconds
        while (rate := single + site + silence) > 0:
            now += rng.expovariate(rate)
            if now >= churn.end:
                break
            self._return_until(now)
            (what,) = rng.choices((self._depart_one, self._lose_site, self._silence), (single, site, silence))
            what(now)
        return Trace(self._seed, churn, self._nodes, tuple(sorted(self._events)))

    def _populate(self) -> None:
        while len(self._nodes) < self._num_nodes:
            site = f"site-{len(self._sites)}"
            for _ in range(min(self._rng.randint(5, 50), self._num_nodes - len(self._nodes))):
                spec = self._new(site, tracker_node=not self._nodes)
                self._join(self._rng.uniform(0, self._churn.warmup_seconds / 3), spec.node_id)

    def _new(self, site: str, tracker_node: bool = False) -> NodeSpec:
        node_id = f"node-{len(self._nodes):06}"
        spec = draw_node(self._rng, node_id, site, self._model_ids, self._churn.files, self._churn.overstated)
        self._nodes[node_id] = replace(spec, tracker_node=tracker_node)
        return self._nodes[node_id]

    def _join(self, now: float, node_id: str) -> None:
        self._events.append(Event(now, node_id, EventKind.JOINS))
        self._sites.setdefault(self._nodes[node_id].site, []).append(node_id)
        # The tracker-node stays: without it there is no tracker, and no mesh.
        if not self._nodes[node_id].tracker_node:
            self._up.append(node_id)

    def _return_until(self, now: float) -> None:
        while self._returns and self._returns[0][0] <= now:
            at, node_id = heapq.heappop(self._returns)
            self._join(at, node_id)

    def _depart_one(self, now: float) -> None:
        if not self._up:
            return
        node_id = self._rng.choice(self._up)
        self._remove(node_id)
        gone = now
        if self._rng.random() < self._churn.clean_share:
            if self._rng.random() < 0.5:
                self._events.append(Event(now, node_id, EventKind.DRAINS))
                gone += self._churn.drain_seconds
            self._events.append(Event(gone, node_id, EventKind.LEAVES))
        else:
            self._events.append(Event(gone, node_id, EventKind.DIES))
        back = node_id if self._rng.random() < self._churn.rejoin_share else self._new(self._some_site()).node_id
        self._replace(gone, back)

    def _lose_site(self, now: float) -> None:
        """A power cut or a lost uplink: all at once, and all back together when it is over."""
        site = self._some_site()
        lost = [i for i in self._sites[site] if not self._nodes[i].tracker_node]
        absence = self._rng.expovariate(1 / self._churn.mean_absence_seconds)
        for node_id in lost:
            self._remove(node_id)
            self._events.append(Event(now, node_id, EventKind.DIES))
            heapq.heappush(self._returns, (now + max(60.0, absence) + self._rng.uniform(0, 60), node_id))

    def _silence(self, now: float) -> None:
        """Mostly so short that the node is at most suspect; one in twenty outlasts the lease."""
        if self._up:
            seconds = self._rng.uniform(20, 60) if self._rng.random() < 0.05 else self._rng.uniform(3, 13)
            self._events.append(Event(now, self._rng.choice(self._up), EventKind.SILENT, seconds))

    def _replace(self, gone: float, node_id: str) -> None:
        absence = self._rng.expovariate(1 / self._churn.mean_absence_seconds)
        heapq.heappush(self._returns, (gone + max(20.0, absence), node_id))

    def _some_site(self) -> str:
        return self._rng.choice(list(self._sites))

    def _remove(self, node_id: str) -> None:
        index = self._up.index(node_id)
        self._up[index] = self._up[-1]
        self._up.pop()
        self._sites[self._nodes[node_id].site].remove(node_id)
