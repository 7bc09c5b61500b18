"""The tracker itself: its registry, leases, ledger and planner, told what a servicer would tell it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import count

from benchmarks.mesh_churn.hardware import described
from benchmarks.mesh_churn.sim_node import Order, SimNode
from benchmarks.mesh_churn.strategy import Surroundings
from meshnet.directive import DirectiveState
from meshnet.errors import Unregistered
from services.tracker.effects import Effects, Settings
from services.tracker.mesh import Mesh
from services.tracker.registry import Member
from services.tracker.remembered import Remembered

# Simulated nodes report a load once, not twice a second: their silence means nothing.
SETTINGS = Settings(answer_seconds=math.inf)


class Ours:
    """`seconds`: real time of each call that may plan, by what called for it; `longest_gap` between two ticks of
    the tracker when nobody is silent: such a tick only publishes counters."""

    name = "ours"

    def __init__(self, around: Surroundings, settings: Settings | None = None, longest_gap: float = 60.0) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._around = around
        ids = count()
        models = {sizes.model_id: sizes.model for sizes in around.catalogue.values()}
        self.mesh = Mesh(settings or SETTINGS, lambda: f"d{next(ids)}", remembered=Remembered(models=models))
        self._members: dict[str, Member] = {}
        self._longest_gap = longest_gap
        self._ticked_at = 0.0

    def joined(self, node: SimNode) -> None:
        self._call("join", lambda now: self._register(node, now))

    def draining(self, node: SimNode) -> None:
        if node.node_id in self._members:
            self._call("drain", lambda now: self.mesh.drain(node.node_id, now))

    def left(self, node: SimNode) -> None:
        if self._members.pop(node.node_id, None) is not None:
            self._call("departure", lambda now: self.mesh.leave(node.node_id, node.incarnation, now))

    def heard_again(self, node: SimNode) -> None:
        shards = node.shards(self._around.catalogue)
        try:
            self._call("heartbeat", lambda now: self.mesh.heartbeat(node.node_id, node.incarnation, shards, now))
        except Unregistered:
            self._around.abandon(node)
            self._call("join", lambda now: self._register(node, now))

    def reported(self, node: SimNode, order: Order, state: DirectiveState, failure: str) -> None:
        shards = node.shards(self._around.catalogue)
        what = "finished order" if state.is_final else "progress"
        ids = node.node_id, node.incarnation, order.order_id
        self._call(what, lambda now: self.mesh.report(*ids, state, shards, now, failure=failure))

    def tick(self, audible: list[SimNode], silent: list[SimNode]) -> None:
        """A heartbeat that tells nothing new only renews the lease, so those of all nodes are one loop here."""
        now = self._around.clock.now
        for node in audible:
            self._members[node.node_id].heard_at = now
        if not silent and now - self._ticked_at < self._longest_gap:
            return
        self._ticked_at = now
        started = time.perf_counter()
        effects = self.mesh.tick(now)
        seconds = time.perf_counter() - started
        lost = [node.node_id for node in silent if node.node_id not in self.mesh.topology.nodes]
        gone = [self._members.pop(node_id) for node_id in lost if node_id in self._members]
        self.seconds["departure" if gone else "tick"].append(seconds)
        self._carry_out(effects)

    def _register(self, node: SimNode, now: float) -> Effects:
        catalogue = self._around.catalogue
        manifests = [catalogue[model_id].model.manifest for model_id in node.spec.files]
        description = described(node.spec, catalogue, node.shards(catalogue))
        effects = self.mesh.register(description, node.incarnation, manifests, now)
        self._members[node.node_id] = self.mesh.registry.member(node.node_id, node.incarnation)
        return effects

    def _call(self, what: str, call: Callable[[float], Effects]) -> None:
        started = time.perf_counter()
        effects = call(self._around.clock.now)
        self.seconds[what].append(time.perf_counter() - started)
        self._carry_out(effects)

    def _carry_out(self, effects: Effects) -> None:
        for d in effects.directives:
            order = Order(d.directive_id, d.kind, d.model_id, d.layers, d.quantization)
            self._around.order(d.node_id, order, _kind_of(d.reason))


def _kind_of(reason: str) -> str:
    """The reason without names and numbers."""
    words = [w for w in reason.split() if not any(c.isdigit() for c in w)]
    return " ".join(words)
