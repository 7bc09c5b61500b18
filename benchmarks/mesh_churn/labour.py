"""How simulated nodes carry out orders: slow loads, failed loads, memory that is not there, drops that drain."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.mesh_churn.catalogue import Catalogue
from benchmarks.mesh_churn.clock import Clock
from benchmarks.mesh_churn.sim_node import Layer, Order, SimNode
from benchmarks.mesh_churn.strategy import Strategy
from benchmarks.mesh_churn.tally import Tally
from benchmarks.mesh_churn.truth import Truth
from meshnet.directive import DirectiveKind, DirectiveState

S = DirectiveState


@dataclass(frozen=True, slots=True)
class Loading:
    """How loads go. `failing` and `slow` are probabilities of a load; a slow one takes `slow_factor` as long."""

    setup_seconds: float = 1.0
    failing: float = 0.01
    slow: float = 0.05
    slow_factor: float = 5.0
    drop_seconds: float = 5.0
    latency_seconds: float = 0.05


class Labour:
    """Each node works at one order at a time. Changes the truth and counts bytes in `tally`."""

    def __init__(self, catalogue: Catalogue, clock: Clock, truth: Truth, seed: int, loading: Loading) -> None:
        self.tally = Tally()
        self.strategy: Strategy
        self._catalogue = catalogue
        self._clock = clock
        self._truth = truth
        self._seed = seed
        self._loading = loading

    def take(self, node: SimNode, order: Order) -> None:
        if node.silent:
            node.inbox.append(order)
            return
        node.queue.append(order)
        self._clock.after(self._loading.latency_seconds, lambda: self._begin(node))

    def abandon(self, node: SimNode) -> None:
        node.queue.clear()
        node.inbox.clear()
        node.running = node.unsent = None

    def heard_again(self, node: SimNode) -> None:
        node.silent = False
        self.strategy.heard_again(node)
        if node.unsent is not None:
            report, node.unsent = node.unsent, None
            self.strategy.reported(node, *report)
        inbox, node.inbox = node.inbox, []
        for order in inbox:
            self.take(node, order)
        self._begin(node)

    def end(self, node: SimNode) -> None:
        """The process is gone, and all that it held."""
        lost = list(node.layers)
        self.tally.departures += 1
        self.tally.lost_bytes += node.weight_bytes(self._catalogue)
        last = [layer for layer in lost if self._truth.replicas[layer[0]][layer[1]] == 1]
        self.tally.last_lost_bytes += self._weight(node, last)
        node.up = False
        self._truth.changed(node, [], lost, self._clock.now)
        self.abandon(node)

    def _begin(self, node: SimNode) -> None:
        """A silent node finishes what it is at, and begins nothing."""
        if not node.up or node.silent or node.running is not None or not node.queue:
            return
        order = node.running = node.queue.popleft()
        self.strategy.reported(node, order, S.ACCEPTED, "")
        if order.kind is DirectiveKind.DROP_SHARD:
            self._clock.after(self._loading.drop_seconds, lambda: self._drop(node, order))
            return
        self.strategy.reported(node, order, S.LOADING, "")
        weights = self._catalogue[order.model_id].weights[order.quantization]
        seconds = sum(weights[layer] for layer in node.new_layers(order)) / node.spec.load_bandwidth
        node.num_loads += 1
        # Drawn by machine, process and number: alike under each strategy.
        rng = random.Random(f"{self._seed} {node.node_id} {node.life} {node.num_loads}")
        slowness = self._loading.slow_factor if rng.random() < self._loading.slow else 1.0
        seconds = self._loading.setup_seconds + slowness * seconds
        if not node.fits(order, self._catalogue):
            self._clock.after(0.5 * seconds, lambda: self._fail(node, order, "out of memory"))
        elif rng.random() < self._loading.failing:
            self._clock.after(rng.random() * seconds, lambda: self._fail(node, order, "could not read the file"))
        else:
            self._clock.after(seconds, lambda: self._ready(node, order))

    def _ready(self, node: SimNode, order: Order) -> None:
        if node.running is not order:
            return
        new = node.new_layers(order)
        node.held.setdefault(order.model_id, {}).update(dict.fromkeys(new, order.quantization))
        gained = [(order.model_id, layer) for layer in new]
        refilled = [layer for layer in gained if not self._truth.replicas[layer[0]][layer[1]]]
        self.tally.loaded_bytes += self._weight(node, gained)
        self.tally.refilled_bytes += self._weight(node, refilled)
        self.tally.thrash_bytes += self._weight(node, [layer for layer in gained if layer in node.loaded])
        node.loaded.update(gained)
        self._truth.changed(node, gained, [], self._clock.now)
        self._report(node, order, S.READY)

    def _drop(self, node: SimNode, order: Order) -> None:
        if node.running is not order:
            return
        held = node.held.get(order.model_id, {})
        lost = [(order.model_id, layer) for layer in order.layers.layers if layer in held]
        self.tally.dropped_bytes += self._weight(node, lost)
        for _, layer in lost:
            del held[layer]
        if not held:
            node.held.pop(order.model_id, None)
        self._truth.changed(node, [], lost, self._clock.now, by_drop=True)
        self._report(node, order, S.DROPPED)

    def _fail(self, node: SimNode, order: Order, failure: str) -> None:
        if node.running is order:
            self._report(node, order, S.FAILED, failure)

    def _report(self, node: SimNode, order: Order, state: DirectiveState, failure: str = "") -> None:
        node.running = None
        self.tally.outcomes[f"{order.kind} {failure or state}"] += 1
        if node.silent:
            node.unsent = order, state, failure
            return
        self.strategy.reported(node, order, state, failure)
        self._begin(node)

    def _weight(self, node: SimNode, layers: list[Layer]) -> int:
        return sum(self._catalogue[i].weights[node.held[i][layer]][layer] for i, layer in layers)
