"""One simulated node: its memory, and the orders that it carries out one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.mesh_churn.catalogue import Catalogue
from benchmarks.mesh_churn.hardware import NodeSpec
from meshnet.directive import DirectiveKind, DirectiveState
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Shard, ShardState
from services.tracker.placement import WORKSPACE_BYTES

Layer = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Order:
    """What a strategy wants of a node. `order_id` means something to the strategy only."""

    order_id: str
    kind: DirectiveKind
    model_id: str
    layers: LayerRange
    quantization: Quantization


@dataclass(slots=True, eq=False)
class SimNode:
    """A running process on a machine. `held`: by model, its READY layers with how they are stored.

    `life` numbers the processes of the machine. While the node is `silent`, orders wait in `inbox`, and `unsent` is the
    report of the one that it was at. `num_loads` counts the loads of this life; `loaded` has all layers of it.
    """

    spec: NodeSpec
    life: int
    held: dict[str, dict[int, Quantization]] = field(default_factory=dict)
    queue: deque[Order] = field(default_factory=deque)
    running: Order | None = None
    up: bool = True
    silent: bool = False
    inbox: list[Order] = field(default_factory=list)
    unsent: tuple[Order, DirectiveState, str] | None = None
    num_loads: int = 0
    loaded: set[Layer] = field(default_factory=set)

    @property
    def node_id(self) -> str:
        return self.spec.node_id

    @property
    def incarnation(self) -> str:
        return f"life-{self.life}"

    @property
    def layers(self) -> Iterator[Layer]:
        return ((model_id, layer) for model_id, layers in self.held.items() for layer in layers)

    def used_bytes(self, catalogue: Catalogue) -> int:
        return WORKSPACE_BYTES + sum(
            catalogue[model_id].room[quantization][layer]
            for model_id, layers in self.held.items()
            for layer, quantization in layers.items()
        )

    def weight_bytes(self, catalogue: Catalogue) -> int:
        return sum(
            catalogue[model_id].weights[quantization][layer]
            for model_id, layers in self.held.items()
            for layer, quantization in layers.items()
        )

    def seconds_a_token(self, catalogue: Catalogue) -> float:
        """Time of one token through every layer that the node holds, of whatever model."""
        return sum(
            self.spec.layer_seconds(catalogue[model_id], quantization)
            for model_id, layers in self.held.items()
            for quantization in layers.values()
        )

    def new_layers(self, order: Order) -> list[int]:
        """What a load really loads: the node keeps what it holds."""
        held = self.held.get(order.model_id, {})
        return [layer for layer in order.layers.layers if layer not in held]

    def fits(self, order: Order, catalogue: Catalogue) -> bool:
        room = catalogue[order.model_id].room[order.quantization]
        return self.used_bytes(catalogue) + sum(room[i] for i in self.new_layers(order)) <= self.spec.true_bytes

    def shards(self, catalogue: Catalogue) -> tuple[Shard, ...]:
        """As the node reports them: what is READY, and what it is loading."""
        ready = (
            _shard(catalogue, model_id, layers, ShardState.READY, quantization)
            for model_id, held in self.held.items()
            for layers, quantization in _runs(held)
        )
        order = self.running
        if order is None or order.kind is not DirectiveKind.LOAD_SHARD:
            return tuple(ready)
        new = dict.fromkeys(self.new_layers(order), order.quantization)
        loading = (
            _shard(catalogue, order.model_id, layers, ShardState.LOADING, quantization)
            for layers, quantization in _runs(new)
        )
        return (*ready, *loading)


def _runs(held: dict[int, Quantization]) -> Iterable[tuple[LayerRange, Quantization]]:
    start: int | None = None
    for layer in sorted(held):
        start = layer if start is None else start
        if held.get(layer + 1) is not held[layer]:
            yield LayerRange(start, layer + 1), held[layer]
            start = None


def _shard(
    catalogue: Catalogue, model_id: str, layers: LayerRange, state: ShardState, quantization: Quantization
) -> Shard:
    total = sum(catalogue[model_id].weights[quantization][layers.start : layers.end])
    return Shard(model_id, layers, quantization, state, total if state is ShardState.READY else 0, total)
