"""Which routes to send a probe through, and what is known of each. Pure: the time is an argument, in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshnet.errors import MissingLayers
from meshnet.routing import find_route
from meshnet.topology import Hop, RouteProbe, Topology

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 30.0
# Routes over replicas change with their load, and a proven one is not probed again when the load changes back.
MAX_REMEMBERED = 256

Route = tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """A token to send through a route. `number` tells it from an older one through the same route."""

    number: int
    model_id: str
    route: Route


@dataclass(slots=True)
class _Record:
    """`outcome` None: nothing is known yet. `running`: the number of the probe under way."""

    outcome: RouteProbe | None = None
    running: int | None = None
    num_failures: int = 0
    retry_at: float = 0.0


class ProbeTable:
    """Outcomes of the routes that begin at one node. A route is forgotten when a hop no longer serves its layers."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._records: dict[tuple[str, Route], _Record] = {}
        self._current: dict[str, Route] = {}
        self._num_started = 0

    def start(self, topology: Topology, now: float) -> tuple[Probe, ...]:
        """Probes to send now: of the routes that this node would use, those that are not known to be ready."""
        self._current = dict(_routes(topology, self._node_id))
        self._forget(topology)
        probes = []
        for model_id, route in self._current.items():
            record = self._records.setdefault((model_id, route), _Record())
            proven = record.outcome is not None and record.outcome.ready
            if not proven and record.running is None and record.retry_at <= now:
                self._num_started += 1
                record.running = self._num_started
                probes.append(Probe(record.running, model_id, route))
        return tuple(probes)

    def retry_at(self) -> float | None:
        """When `start` has something to do although the topology stays as it is."""
        times = [
            record.retry_at
            for key in self._current.items()
            if (record := self._records[key]).running is None and not (record.outcome and record.outcome.ready)
        ]
        return min(times, default=None)

    def succeeded(self, probe: Probe, latency_seconds: float) -> None:
        record = self._ended(probe)
        if record:
            record.outcome = RouteProbe(probe.model_id, probe.route, latency_seconds=latency_seconds)
            record.num_failures = 0

    def failed(self, probe: Probe, failure: str, now: float) -> None:
        """Tried again, each time after twice the pause."""
        record = self._ended(probe)
        if record:
            record.outcome = RouteProbe(probe.model_id, probe.route, failure or "no reason given")
            _back_off(record, now)

    def postponed(self, probe: Probe, now: float) -> None:
        """A hop had no room for it: that says nothing about the route. Tried again like one that failed."""
        record = self._ended(probe)
        if record:
            _back_off(record, now)

    def generation_failed(self, model_id: str, route: Route, failure: str, now: float) -> None:
        """A hop failed under a generation: the route is not ready until a new probe comes through."""
        record = self._records.get((model_id, route))
        if record and record.outcome and record.outcome.ready:
            record.outcome = RouteProbe(model_id, route, failure or "no reason given")
            record.num_failures, record.retry_at = 0, now

    def outcomes(self) -> tuple[RouteProbe, ...]:
        """What is known of the routes that this node uses, by model."""
        known = (
            self._ready(model_id, route) or self._records[model_id, route].outcome
            for model_id, route in sorted(self._current.items())
        )
        return tuple(outcome for outcome in known if outcome)

    def choose(self, topology: Topology, model_id: str, route: Route) -> Route:
        """The route itself, unless it is not known to be ready and another one is, that still stands."""
        ready = self._ready(model_id, route)
        return ready.hops if ready and topology.stands(model_id, ready.hops) else route

    def _ready(self, model_id: str, route: Route) -> RouteProbe | None:
        """The outcome of this route if it is ready, else of the newest that is."""
        records = [self._records.get((model_id, route), _Record())]
        records += reversed([record for (of, _), record in self._records.items() if of == model_id])
        return next((record.outcome for record in records if record.outcome and record.outcome.ready), None)

    def _ended(self, probe: Probe) -> _Record | None:
        """The record that a probe belongs to, if it has not been forgotten since."""
        record = self._records.get((probe.model_id, probe.route))
        if record is None or record.running != probe.number:
            return None
        record.running = None
        return record

    def _forget(self, topology: Topology) -> None:
        for model_id, route in tuple(self._records):
            if model_id not in topology.models or not topology.stands(model_id, route):
                del self._records[model_id, route]
        spare = [key for key in self._records if self._current.get(key[0]) != key[1]]
        for key in spare[: max(len(spare) - MAX_REMEMBERED, 0)]:
            del self._records[key]


def _back_off(record: _Record, now: float) -> None:
    pause = FIRST_RETRY_SECONDS * 2.0 ** min(record.num_failures, 10)
    record.num_failures += 1
    record.retry_at = now + min(pause, LONGEST_RETRY_SECONDS)


def _routes(topology: Topology, node_id: str) -> Iterator[tuple[str, Route]]:
    """The route that a generation would take now, for each model that has one from this node."""
    node = topology.nodes.get(node_id)
    for model_id in sorted(topology.models):
        if node and 0 in node.layers(model_id):
            try:
                yield model_id, find_route(topology, model_id, node_id)
            except MissingLayers:
                continue
