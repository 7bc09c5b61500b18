"""What decentralised systems do: each node picks its layers on its own, from what all nodes announce.

The memory of a node is filled with windows of consecutive layers, of any of the models whose files it has. What a node
has picked counts from then on, loaded or not; what a dead node had picked counts until its announcement runs out.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate, count

from benchmarks.mesh_churn.sim_node import Order, SimNode
from benchmarks.mesh_churn.strategy import Surroundings
from meshnet.directive import DirectiveKind, DirectiveState
from meshnet.model import LayerRange, Quantization, merge_layers
from services.tracker.placement import WORKSPACE_BYTES

ANNOUNCED_SECONDS = 15.0  # as long as the tracker's lease


class Alone:
    """`announced`: by running process, the windows that it has picked by model."""

    name: str

    def __init__(self, around: Surroundings, seed: int) -> None:
        self.around = around
        self.rng = random.Random(seed)
        self.announced: dict[SimNode, dict[str, set[int]]] = {}
        self._room: dict[SimNode, int] = {}
        self._ids = count()
        self._died: dict[SimNode, float] = {}
        self._prefixes: dict[tuple[str, Quantization], list[int]] = {}

    def pick(self, node: SimNode, free_bytes: int) -> tuple[str, LayerRange] | None:
        """A window that fits, or None if nothing does."""
        raise NotImplementedError

    def repicked(self, node: SimNode) -> None:
        """What the node announces has changed."""

    def announce(self, node: SimNode, model_id: str, layers: set[int]) -> None:
        self.announced[node].setdefault(model_id, set()).update(layers)
        self.repicked(node)

    def withdraw(self, node: SimNode, model_id: str, layers: set[int]) -> None:
        self.announced[node][model_id] -= layers
        self.repicked(node)

    def joined(self, node: SimNode) -> None:
        self.announced[node] = {}
        self._room[node] = node.spec.vram_bytes - WORKSPACE_BYTES
        self.fill(node)

    def draining(self, node: SimNode) -> None:
        pass

    def left(self, node: SimNode) -> None:
        if node in self.announced:
            self.announced[node] = {}
            self.repicked(node)
            del self.announced[node], self._room[node]

    def heard_again(self, node: SimNode) -> None:
        pass

    def reported(self, node: SimNode, order: Order, state: DirectiveState, failure: str) -> None:
        """After a failure it picks again; if memory was short, it counts on half of what it wanted, as the tracker."""
        if state is DirectiveState.FAILED:
            layers = set(order.layers.layers) - node.held.get(order.model_id, {}).keys()
            wanted = self.bytes_of(node, order.model_id, layers)
            self.withdraw(node, order.model_id, layers)
            self._room[node] -= wanted // 2 if failure == "out of memory" else 0
            self.fill(node)

    def tick(self, audible: list[SimNode], silent: list[SimNode]) -> None:
        now = self.around.clock.now
        for node in silent:
            if not node.up:
                self._died.setdefault(node, now)
        for node, at in list(self._died.items()):
            if now - at >= ANNOUNCED_SECONDS:
                del self._died[node]
                self.left(node)

    def fill(self, node: SimNode) -> None:
        self.load(node, self.picks(node))

    def picks(self, node: SimNode) -> list[tuple[str, LayerRange]]:
        """Announces windows until nothing more fits."""
        picks: list[tuple[str, LayerRange]] = []
        while (picked := self.pick(node, self.free_bytes(node))) is not None:
            self.announce(node, picked[0], set(picked[1].layers))
            picks.append(picked)
        return picks

    def load(self, node: SimNode, picks: list[tuple[str, LayerRange]]) -> None:
        for model_id, layers in picks:
            self._order(node, DirectiveKind.LOAD_SHARD, model_id, layers)

    def drop_all(self, node: SimNode) -> None:
        """Of what the node holds or was to load."""
        self.around.abandon(node)
        for model_id, held in node.held.items():
            for layers in merge_layers(frozenset(held)):
                self._order(node, DirectiveKind.DROP_SHARD, model_id, layers)

    def free_bytes(self, node: SimNode) -> int:
        picked = self.announced[node].items()
        return self._room[node] - sum(self.bytes_of(node, model_id, layers) for model_id, layers in picked)

    def bytes_of(self, node: SimNode, model_id: str, layers: set[int]) -> int:
        room = self.around.catalogue[model_id].room[node.spec.quantization]
        return sum(room[layer] for layer in layers)

    def reach(self, node: SimNode, model_id: str, start: int, free_bytes: int) -> int:
        """One past the last layer that it can take from `start` on: up to what it has, as far as memory goes."""
        prefix = self._prefix(model_id, node.spec.quantization)
        has = self.announced[node].get(model_id, set())
        end = bisect_right(prefix, prefix[start] + free_bytes) - 1
        return min((layer for layer in has if start <= layer < end), default=max(start, end))

    def _prefix(self, model_id: str, quantization: Quantization) -> list[int]:
        if (model_id, quantization) not in self._prefixes:
            room = self.around.catalogue[model_id].room[quantization]
            self._prefixes[model_id, quantization] = list(accumulate(room, initial=0))
        return self._prefixes[model_id, quantization]

    def _order(self, node: SimNode, kind: DirectiveKind, model_id: str, layers: LayerRange) -> None:
        order = Order(f"{self.name}{next(self._ids)}", kind, model_id, layers, node.spec.quantization)
        self.around.order(node.node_id, order, "picked by the node")


class RandomChoice(Alone):
    """A random window of a random model, again and again until nothing fits."""

    name = "random"

    def pick(self, node: SimNode, free_bytes: int) -> tuple[str, LayerRange] | None:
        files = list(node.spec.files)
        self.rng.shuffle(files)
        for model_id in files:
            starts = list(range(self.around.catalogue[model_id].num_layers))
            self.rng.shuffle(starts)
            for start in starts:
                end = self.reach(node, model_id, start, free_bytes)
                if end > start:
                    return model_id, LayerRange(start, end)
        return None
