"""Weakest-window choice: a joining node takes the stretch with the least throughput, as in Petals."""

from __future__ import annotations

from benchmarks.mesh_churn.alone import Alone
from benchmarks.mesh_churn.sim_node import Layer, SimNode
from benchmarks.mesh_churn.strategy import Surroundings
from meshnet.model import LayerRange

# A node moves only if the weakest layer of its models would have this much less than after the move.
BALANCE_QUALITY = 0.75


class WeakestChoice(Alone):
    """Of all windows that fit: the one whose weakest layer has the least throughput, then the least in all.

    A node announces one over the time of a token through what it has picked, for each of these layers. With
    `check_seconds`, each node asks itself that often on average whether it should be elsewhere, and if so drops all and
    picks again: the rebalancing of such systems.
    """

    def __init__(self, around: Surroundings, seed: int, check_seconds: float | None = None) -> None:
        super().__init__(around, seed)
        self.name = "weakest" if check_seconds is None else "weakest, moving"
        self.moves = 0
        self._check_seconds = check_seconds
        self._throughput = {i: [0.0] * sizes.num_layers for i, sizes in around.catalogue.items()}
        self._counted: dict[SimNode, tuple[float, list[Layer]]] = {}

    def pick(self, node: SimNode, free_bytes: int) -> tuple[str, LayerRange] | None:
        best: tuple[tuple[float, float, int], str, LayerRange] | None = None
        for model_id in node.spec.files:
            throughput = self._throughput[model_id]
            for start in range(len(throughput)):
                end = self.reach(node, model_id, start, free_bytes)
                if end > start:
                    window = throughput[start:end]
                    rank = (min(window), sum(window) / len(window), start - end)
                    if best is None or rank < best[0]:
                        best = rank, model_id, LayerRange(start, end)
        return None if best is None else best[1:]

    def joined(self, node: SimNode) -> None:
        super().joined(node)
        self._check_later(node)

    def repicked(self, node: SimNode) -> None:
        old, layers = self._counted.pop(node, (0.0, []))
        for model_id, layer in layers:
            self._throughput[model_id][layer] = max(0.0, self._throughput[model_id][layer] - old)
        seconds, layers = 0.0, []
        for model_id, picked in self.announced[node].items():
            a_layer = node.spec.layer_seconds(self.around.catalogue[model_id], node.spec.quantization)
            seconds += a_layer * len(picked)
            layers += [(model_id, layer) for layer in picked]
        if layers:
            for model_id, layer in layers:
                self._throughput[model_id][layer] += 1 / seconds
            self._counted[node] = 1 / seconds, layers

    def _check_later(self, node: SimNode) -> None:
        if self._check_seconds is not None:
            wait = self.rng.expovariate(1 / self._check_seconds)
            self.around.clock.after(wait, lambda: self._check(node))

    def _check(self, node: SimNode) -> None:
        if not node.up:
            return
        self._check_later(node)
        if node.silent or node.running is not None or node.queue:
            return
        before, weakest = self.announced[node], self._weakest(node)
        self.announced[node] = {}
        self.repicked(node)
        picks = self.picks(node)
        if weakest < BALANCE_QUALITY * self._weakest(node):
            self.moves += 1
            self.drop_all(node)
            self.load(node, picks)
        else:
            self.announced[node] = before
            self.repicked(node)

    def _weakest(self, node: SimNode) -> float:
        return min(min(self._throughput[model_id]) for model_id in node.spec.files)
