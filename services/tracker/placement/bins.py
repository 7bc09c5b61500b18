"""A node as something to put layers in: how far it reaches, and how long its stage would take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.model import LayerRange, Quantization
from services.tracker.placement.accounts import Account
from services.tracker.placement.costs import NANOSECONDS, Costs

# A hop to a node that has not measured its way to the tracker.
NOMINAL_HOP_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Bin:
    """A node that could take layers of a run at one quantization.

    `room` is in bytes; `sizes`, `weights` and `work` as in Costs. `speed`: bytes of work a second; `held_work`: work of
    the model's layers that it holds already; `hop_nanoseconds`: to reach it. `before` and `after`: it holds the layer
    on that side of the run. `fetches`: it lacks the files, and must fetch the weights.
    """

    node_id: str
    quantization: Quantization
    room: int
    sizes: Sequence[int]
    weights: Sequence[int]
    work: Sequence[int]
    speed: int
    held_work: int = 0
    hop_nanoseconds: int = 0
    before: bool = False
    after: bool = False
    fetches: bool = False

    def reach(self, start: int, end: int, level: int | None = None) -> int:
        """One past the last layer that it can take from `start` on, its stage taking `level` nanoseconds at most."""
        furthest = min(end, bisect_right(self.sizes, self.room + self.sizes[start]) - 1)
        if level is not None:
            work = (level - self.hop_nanoseconds) * self.speed // NANOSECONDS - self.held_work
            furthest = min(furthest, bisect_right(self.work, work + self.work[start]) - 1)
        return max(start, furthest)

    def stage_nanoseconds(self, layers: LayerRange | None = None) -> int:
        """Time of a decode step through what it holds of the model, and these layers too."""
        work = self.held_work + (self.work[layers.end] - self.work[layers.start] if layers else 0)
        return self.hop_nanoseconds + work * NANOSECONDS // self.speed if work else 0

    def moved(self, layers: LayerRange) -> int:
        """Bytes that it must read to take the layers."""
        return self.weights[layers.end] - self.weights[layers.start]


def make_bin(costs: Costs, account: Account, run: LayerRange, room: int, quantization: Quantization) -> Bin:
    held = account.layers(costs.model_id)
    return Bin(
        node_id=account.node_id,
        quantization=quantization,
        room=room,
        sizes=costs.sizes(quantization),
        weights=costs.weights(quantization),
        work=costs.work(quantization),
        speed=costs.bytes_per_second(account.node, quantization),
        held_work=account.stage_work(costs) if held else 0,
        hop_nanoseconds=_hop_nanoseconds(account),
        before=run.start - 1 in held,
        after=run.end in held,
        fetches=not account.has_files(costs.model_id),
    )


def _hop_nanoseconds(account: Account) -> int:
    """Half of the way to the tracker and back: what is known of every node, whoever its neighbours will be."""
    seconds = next((link.rtt_seconds / 2 for link in account.node.links if not link.node_id), NOMINAL_HOP_SECONDS)
    return int(seconds * NANOSECONDS)
