"""The simulated mesh: a trace happens to its nodes, and a strategy gives them orders."""

from __future__ import annotations

from benchmarks.mesh_churn.catalogue import Catalogue
from benchmarks.mesh_churn.clock import Clock
from benchmarks.mesh_churn.labour import Labour, Loading
from benchmarks.mesh_churn.sim_node import Order, SimNode
from benchmarks.mesh_churn.strategy import Strategy
from benchmarks.mesh_churn.tally import Tally
from benchmarks.mesh_churn.trace import Event, EventKind, Trace
from benchmarks.mesh_churn.truth import Truth


class World:
    """`nodes` by id are those that run. The strategy sees the dead as silent for `forget_seconds`."""

    def __init__(
        self,
        trace: Trace,
        catalogue: Catalogue,
        *,
        loading: Loading | None = None,
        tick_seconds: float = 3.0,
        forget_seconds: float = 30.0,
    ) -> None:
        self.trace = trace
        self.catalogue = catalogue
        self.clock = Clock()
        self.truth = Truth(catalogue)
        self.nodes: dict[str, SimNode] = {}
        self._labour = Labour(catalogue, self.clock, self.truth, trace.seed, loading or Loading())
        self._tick_seconds = tick_seconds
        self._forget_seconds = forget_seconds
        self._lives: dict[str, int] = {}
        self._dead: dict[str, tuple[float, SimNode]] = {}

    @property
    def tally(self) -> Tally:
        """Counts begin again when the warm-up is over."""
        return self._labour.tally

    def start(self, strategy: Strategy) -> None:
        self._labour.strategy = strategy
        for event in self.trace.events:
            self.clock.at(event.at, lambda event=event: self._happen(event))  # type: ignore[misc]
        self.clock.every(self._tick_seconds, self._tick)
        self.clock.at(self.trace.churn.warmup_seconds, self._forget_tally)

    def order(self, node_id: str, order: Order, reason: str) -> None:
        self.tally.orders[f"{order.kind} {reason}"] += 1
        node = self.nodes.get(node_id)
        if node is not None:  # Else it was sent to the dead.
            self._labour.take(node, order)

    def abandon(self, node: SimNode) -> None:
        self._labour.abandon(node)

    def _happen(self, event: Event) -> None:
        if event.kind is EventKind.JOINS:
            self._join(event.node_id)
            return
        node = self.nodes.get(event.node_id)
        if node is None:
            return
        match event.kind:
            case EventKind.DRAINS:
                self._labour.strategy.draining(node)
            case EventKind.LEAVES:
                self._end(node)
                self._labour.strategy.left(node)
            case EventKind.DIES:
                self._end(node)
                self._dead[node.node_id] = self.clock.now, node
            case EventKind.SILENT if not node.silent:
                node.silent = True
                self.clock.after(event.seconds, lambda: self._hear(node))

    def _join(self, node_id: str) -> None:
        self._lives[node_id] = self._lives.get(node_id, 0) + 1
        node = SimNode(self.trace.nodes[node_id], self._lives[node_id])
        self.nodes[node_id] = node
        self._dead.pop(node_id, None)
        self.tally.joins += 1
        self._labour.strategy.joined(node)

    def _end(self, node: SimNode) -> None:
        del self.nodes[node.node_id]
        self._labour.end(node)

    def _hear(self, node: SimNode) -> None:
        if node.up:
            self._labour.heard_again(node)

    def _tick(self) -> None:
        now = self.clock.now
        self._dead = {i: (at, n) for i, (at, n) in self._dead.items() if at + self._forget_seconds > now}
        nodes = list(self.nodes.values())
        silent = [node for node in nodes if node.silent]
        audible = [node for node in nodes if not node.silent] if silent else nodes
        self._labour.strategy.tick(audible, silent + [node for _, node in self._dead.values()])
        self.tally.node_seconds += len(nodes) * self._tick_seconds

    def _forget_tally(self) -> None:
        self._labour.tally = Tally()
