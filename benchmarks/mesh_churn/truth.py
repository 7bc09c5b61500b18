"""What is really served, whatever a tracker believes: replicas and throughput of every layer, and gaps."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.mesh_churn.catalogue import Catalogue
from benchmarks.mesh_churn.sim_node import Layer, SimNode


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which some layer of a model was served by nobody. `end` None: it stayed to the end."""

    model_id: str
    start: float
    end: float | None
    by_drop: bool

    def seconds(self, until: float) -> float:
        return (until if self.end is None else self.end) - self.start


class Truth:
    """Counts READY replicas on running nodes, and sums their rates.

    A node's rate is one over the time of a token through all layers that it holds: it shares its time so that each of
    them gets as many tokens. The throughput of a model is at most that of its weakest layer, the bottleneck.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.replicas = {model_id: [0] * sizes.num_layers for model_id, sizes in catalogue.items()}
        self.rates = {model_id: [0.0] * sizes.num_layers for model_id, sizes in catalogue.items()}
        self._num_missing = {model_id: sizes.num_layers for model_id, sizes in catalogue.items()}
        self._since: dict[str, tuple[float, bool]] = dict.fromkeys(catalogue, (0.0, False))
        self._rated: dict[str, tuple[float, list[Layer]]] = {}
        self.closed_gaps: list[Gap] = []

    def covered(self, model_id: str) -> bool:
        return not self._num_missing[model_id]

    def bottleneck(self, model_id: str) -> float:
        """Tokens a second, summed over all sessions."""
        return min(self.rates[model_id]) if self.covered(model_id) else 0.0

    def gaps(self) -> list[Gap]:
        """All so far, those still open last."""
        still = [Gap(i, since, None, dropped) for i, (since, dropped) in self._since.items()]
        return self.closed_gaps + [gap for gap in still if not self.covered(gap.model_id)]

    def changed(
        self, node: SimNode, gained: list[Layer], lost: list[Layer], now: float, *, by_drop: bool = False
    ) -> None:
        """After `node.held` has changed by these layers (all are lost with a node that is gone)."""
        for layer in gained:
            self._gain(*layer, now)
        for layer in lost:
            self._lose(*layer, now, by_drop)
        self._rate(node)

    def _gain(self, model_id: str, layer: int, now: float) -> None:
        self.replicas[model_id][layer] += 1
        if self.replicas[model_id][layer] == 1:
            self._num_missing[model_id] -= 1
            if not self._num_missing[model_id]:
                start, by_drop = self._since[model_id]
                self.closed_gaps.append(Gap(model_id, start, now, by_drop))

    def _lose(self, model_id: str, layer: int, now: float, by_drop: bool) -> None:
        self.replicas[model_id][layer] -= 1
        assert self.replicas[model_id][layer] >= 0
        if not self.replicas[model_id][layer]:
            if not self._num_missing[model_id]:
                self._since[model_id] = (now, by_drop)
            self._num_missing[model_id] += 1

    def _rate(self, node: SimNode) -> None:
        """Takes the node's old rate off all layers that it had, and puts the new one on those that it has."""
        old, layers = self._rated.pop(node.node_id, (0.0, []))
        for model_id, layer in layers:
            left = self.rates[model_id][layer] - old
            self.rates[model_id][layer] = max(left, 0.0) if self.replicas[model_id][layer] else 0.0
        if node.up and node.held:
            new, layers = 1 / node.seconds_a_token(self._catalogue), list(node.layers)
            for model_id, layer in layers:
                self.rates[model_id][layer] += new
            self._rated[node.node_id] = new, layers
