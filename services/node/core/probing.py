"""Which routes to send a probe through, what is known of each, and which one to use. Pure: times are in seconds."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

from meshnet.errors import MissingLayers
from meshnet.hop_cost import Wish
from meshnet.routing import Route, choose_route, find_route, find_routes
from meshnet.topology import Node, RouteProbe, ShardState, Topology

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 30.0
# A proven route is proven anew this often, so that its latency is of today.
REFRESH_SECONDS = 60.0
# Routes are laid anew when nodes or layers come or go, and this often for what was measured meanwhile.
PLAN_SECONDS = 60.0
# Routes of a model that are kept proven. Together they pass as many of its nodes as may be.
MAX_ROUTES = 8
MAX_AT_ONCE = 4
# A proven route is remembered while another one is cheaper.
MAX_REMEMBERED = 32


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
    due_at: float = 0.0

    @property
    def ready(self) -> bool:
        return self.outcome is not None and self.outcome.ready


class ProbeTable:
    """The routes that begin at one node, a few of each model, and their outcomes.

    A route is forgotten when a hop no longer serves its layers.
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._records: dict[tuple[str, Route], _Record] = {}
        self._wanted: dict[str, tuple[Route, ...]] = {}
        self._planned_for: Hashable = None
        self._planned_at = 0.0
        self._num_started = 0
        self._seen: Topology | None = None

    def start(self, topology: Topology, now: float) -> tuple[Probe, ...]:
        """Probes to send now: of the routes that this node wants to use, those whose turn it is."""
        self._plan(topology, now)
        self._forget(topology)
        self._seen = topology
        for key in self._keys():
            self._records.setdefault(key, _Record())
        free = MAX_AT_ONCE - sum(record.running is not None for record in self._records.values())
        due = [key for key in self._keys() if self._records[key].running is None and self._records[key].due_at <= now]
        # What is not ready first, and of that the cheapest routes.
        due.sort(key=lambda key: self._records[key].ready)
        return tuple(self._started(*key) for key in due[: max(free, 0)])

    def retry_at(self) -> float | None:
        """When `start` has something to do although the topology stays as it is, and no probe ends before."""
        records = [self._records[key] for key in self._keys()]
        if sum(record.running is not None for record in self._records.values()) >= MAX_AT_ONCE:
            return None
        return min((record.due_at for record in records if record.running is None), default=None)

    def succeeded(self, probe: Probe, latency_seconds: float, now: float) -> None:
        record = self._ended(probe)
        if record:
            record.outcome = RouteProbe(probe.model_id, probe.route, latency_seconds=latency_seconds)
            record.num_failures, record.due_at = 0, now + REFRESH_SECONDS

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

    def generation_failed(self, model_id: str, node_id: str, failure: str, now: float) -> None:
        """A hop failed under a generation: no route through it is ready until a new probe comes through."""
        for (of, route), record in self._records.items():
            if of == model_id and record.ready and any(hop.node_id == node_id for hop in route[1:]):
                record.outcome = RouteProbe(model_id, route, said_of(route, node_id, failure) or "no reason given")
                record.num_failures, record.due_at = 0, now

    def outcomes(self) -> tuple[RouteProbe, ...]:
        """What is known of the cheapest route of each model; of another one that is ready if that is not."""
        known = (self._outcome(model_id, routes) for model_id, routes in sorted(self._wanted.items()))
        return tuple(outcome for outcome in known if outcome)

    def choose(self, topology: Topology, model_id: str, wish: Wish, avoid: Collection[str] = ()) -> Route:
        """The cheapest route that is ready, as `find_route` would choose; if none is, any that passes no node of
        `avoid`.

        Raises UnknownModel or MissingLayers.
        """
        ready = [route for (of, route), record in self._records.items() if of == model_id and record.ready]
        if topology is not self._seen:
            ready = [route for route in ready if model_id in topology.models and topology.stands(model_id, route)]
        return choose_route(topology, model_id, ready, wish) or find_route(
            topology, model_id, self._node_id, avoid=avoid, wish=wish
        )

    def _plan(self, topology: Topology, now: float) -> None:
        """Lays the routes anew if that may change them."""
        shape = _shape(topology)
        if shape != self._planned_for or now >= self._planned_at + PLAN_SECONDS:
            self._planned_for, self._planned_at = shape, now
            self._wanted = dict(_routes(topology, self._node_id))

    def _keys(self) -> list[tuple[str, Route]]:
        """All routes that this node wants to use: the cheapest of each model, then the others."""
        keys = [
            (rank, model_id, route) for model_id, routes in self._wanted.items() for rank, route in enumerate(routes)
        ]
        return [(model_id, route) for _, model_id, route in sorted(keys, key=lambda key: key[0])]

    def _started(self, model_id: str, route: Route) -> Probe:
        self._num_started += 1
        self._records[model_id, route].running = self._num_started
        return Probe(self._num_started, model_id, route)

    def _outcome(self, model_id: str, wanted: tuple[Route, ...]) -> RouteProbe | None:
        first = [self._records.get((model_id, route), _Record()) for route in wanted]
        rest = reversed([record for (of, _), record in self._records.items() if of == model_id])
        ready = (record.outcome for record in (*first, *rest) if record.ready)
        return next(ready, first[0].outcome)

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
        wanted = set(self._keys())
        spare = [key for key in self._records if key not in wanted]
        for key in spare[: max(len(spare) - MAX_REMEMBERED, 0)]:
            del self._records[key]


def said_of(route: Route, node_id: str, failure: str) -> str:
    """A failure of a hop, with the layers that are not to be had."""
    layers = ", ".join(str(hop.layers) for hop in route if hop.node_id == node_id)
    return f"layers {layers} do not answer: {failure}" if layers else failure


def _back_off(record: _Record, now: float) -> None:
    pause = FIRST_RETRY_SECONDS * 2.0 ** min(record.num_failures, 10)
    record.num_failures += 1
    record.due_at = now + min(pause, LONGEST_RETRY_SECONDS)


def _shape(topology: Topology) -> Hashable:
    """What of a topology decides which routes there are."""
    models = tuple((model_id, model.manifest.revision) for model_id, model in sorted(topology.models.items()))
    return models, tuple(_shape_of(node) for _, node in sorted(topology.nodes.items()))


def _shape_of(node: Node) -> Hashable:
    ready = tuple((shard.model_id, shard.layers) for shard in node.shards if shard.state is ShardState.READY)
    return node.node_id, node.alive, node.draining, ready


def _routes(topology: Topology, node_id: str) -> Iterator[tuple[str, tuple[Route, ...]]]:
    """The routes that generations would take, for each model that has one from this node."""
    node = topology.nodes.get(node_id)
    spread = zlib.crc32(node_id.encode())
    for model_id in sorted(topology.models):
        if node and 0 in node.layers(model_id):
            try:
                yield model_id, find_routes(topology, model_id, node_id, limit=MAX_ROUTES, spread=spread)
            except MissingLayers:
                continue
