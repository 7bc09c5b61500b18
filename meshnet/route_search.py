"""The cheapest way through the layers of a model.

A route grows layer by layer. The states at a layer are "a frame that has come through all layers before this one lies
at this node": each goes on at its node for one layer more, or moves to a node that serves the layer. Every move leads
to a higher layer, so one pass over the layers finds what Dijkstra's algorithm would, without a queue, and every
boundary between two layers is a place to cut.

A link that nobody has measured is the sum of its two ends (see `HopCosts`): the frame moves over it through a place
that all nodes share, at the price of one end to get there and the other to leave. That makes the moves at a layer as
few as the nodes that serve it, not their square.

The measured links are tried one by one. Where there are very many, each is tried only as early and as late as the frame
can move over it. Costs are linear in the layers: between the two, a move one layer later saves or costs what any other
does, so one of them is the best, or one of the two nodes runs nothing and is better left out (as long as no detour is
shorter than the direct link).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from meshnet.hop_cost import HopCosts
from meshnet.model import LayerRange
from meshnet.topology import Hop, Link, Node

# Sums of the same times in another order differ by less; a cheaper route differs by more.
EQUAL_SECONDS = 1e-9
# With more pairs of measured nodes than this, each is tried only at the two ends of where it can be used.
MAX_PAIRS_EVERYWHERE = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """Layers `[start, end)` that a node serves one after the other, and none beside them."""

    node: Node
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Stop:
    """A hop of a route, and the way to it."""

    before: _Stop | None
    run: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Move:
    """The frame moves to a run, at this price so far."""

    run: int
    seconds: float
    before: _Stop | None


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two runs with a measured link between their nodes, and the layers before which a frame can move over it."""

    sender: int
    receiver: int
    link: Link
    layers: range


class Layout:
    """Who serves what, and the measured links between them: what all searches in a snapshot have in common.

    The runs together must be all layers.
    """

    def __init__(self, runs: Sequence[Run], num_layers: int) -> None:
        self.runs = runs
        self.num_layers = num_layers
        self.starting: defaultdict[int, list[int]] = defaultdict(list)
        self._by_node: defaultdict[str, list[int]] = defaultdict(list)
        for index, run in enumerate(runs):
            self.starting[run.start].append(index)
            self._by_node[run.node.node_id].append(index)
        pairs: dict[tuple[int, int], _Pair] = {}
        # The sender's own word comes first.
        for pair in sorted(self._pairs(), key=lambda pair: runs[pair.receiver].node.node_id != pair.link.node_id):
            pairs.setdefault((pair.sender, pair.receiver), pair)
        self.pairs = tuple(pairs.values())
        self.receivers: defaultdict[int, set[int]] = defaultdict(set)
        for pair in self.pairs:
            self.receivers[pair.sender].add(pair.receiver)

    def first(self, entry_node_id: str) -> int:
        """The run in which routes from this node begin. Raises StopIteration if it does not serve layer 0."""
        return next(index for index in self._by_node[entry_node_id] if self.runs[index].start == 0)

    def _pairs(self) -> Iterator[_Pair]:
        for index, run in enumerate(self.runs):
            for link in run.node.links:
                for other in self._by_node.get(link.node_id, ()):
                    far = self.runs[other]
                    if far.start <= run.end and run.start <= far.end and index != other:
                        yield from self._both_ways(index, other, link)

    def _both_ways(self, index: int, other: int, link: Link) -> Iterator[_Pair]:
        for sender, receiver in ((index, other), (other, index)):
            one, two = self.runs[sender], self.runs[receiver]
            first = two.start if two.start > one.start else one.start + 1
            last = one.end if one.end < two.end else two.end - 1
            if first <= last:
                yield _Pair(sender, receiver, link, range(first, last + 1))


class RouteSearch:
    """The search of the cheapest route from layer 0 of an entry node. Between equals each hop goes as far as it can, to
    the first run of those that are given. `num_states` and `num_moves` count what was looked at."""

    def __init__(self, layout: Layout, entry_node_id: str, costs: HopCosts) -> None:
        self._layout = layout
        self._runs = runs = layout.runs
        self._costs = costs
        self._first = layout.first(entry_node_id)
        self._leave = ends = [costs.link_end_seconds(run.node) for run in runs]
        self._enter = [costs.entering_seconds(run.node, end) for run, end in zip(runs, ends, strict=True)]
        self._layer = [costs.layer_seconds(run.node) for run in runs]
        self._shortcuts: defaultdict[int, list[tuple[int, int, float]]] = defaultdict(list)
        everywhere = len(layout.pairs) <= MAX_PAIRS_EVERYWHERE
        for pair in layout.pairs:
            sender, receiver = runs[pair.sender].node, runs[pair.receiver].node
            price = costs.entering_seconds(receiver, costs.measured_link_seconds(pair.link, sender, receiver))
            for layer in pair.layers if everywhere else {pair.layers[0], pair.layers[-1]}:
                self._shortcuts[layer].append((pair.sender, pair.receiver, price))
        # Where the frame may lie: what that has cost, since which layer, and how it came there.
        self._seconds = [inf] * len(runs)
        self._since = [0] * len(runs)
        self._before: list[_Stop | None] = [None] * len(runs)
        self.num_states = self.num_moves = 0

    def route(self) -> tuple[Hop, ...]:
        """The hops."""
        held: list[int] = []
        for layer in range(self._layout.num_layers):
            moves = list(self._moves(layer, held)) if layer else [self._begin()]
            for index in held:
                if self._runs[index].end == layer:
                    self._seconds[index] = inf
            held = [index for index in held if self._runs[index].end > layer] + self._layout.starting[layer]
            for move in moves:
                self._take(move, layer)
            for index in held:
                self._seconds[index] += self._layer[index]
            self.num_states += len(held)
        last = min(held, key=lambda index: self._seconds[index])
        return self._hops(self._stop(last, self._layout.num_layers))

    def _begin(self) -> _Move:
        return _Move(self._first, self._costs.entering_seconds(self._runs[self._first].node, 0.0), None)

    def _moves(self, layer: int, held: list[int]) -> Iterator[_Move]:
        """The moves that pay before a layer, from where the frame may lie now."""
        seconds, enter = self._seconds, self._enter
        if not held:
            return
        best = min(held, key=lambda index: seconds[index] + self._leave[index])
        shared = seconds[best] + self._leave[best]
        stop = self._stop(best, layer)
        measured = self._layout.receivers.get(best, ())
        for index in [i for i in held if self._runs[i].end > layer] + self._layout.starting[layer]:
            self.num_moves += 1
            if index in measured:
                yield from self._shared_move(layer, held, index)
            elif shared + enter[index] <= seconds[index] + EQUAL_SECONDS:
                yield _Move(index, shared + enter[index], stop)
        for sender, receiver, link in self._shortcuts[layer]:
            self.num_moves += 1
            if seconds[sender] + link <= seconds[receiver] + EQUAL_SECONDS:
                yield _Move(receiver, seconds[sender] + link, self._stop(sender, layer))

    def _shared_move(self, layer: int, held: list[int], receiver: int) -> Iterator[_Move]:
        """The cheapest over a link to this run that is not measured."""
        others = [index for index in held if receiver not in self._layout.receivers.get(index, ())]
        if others:
            best = min(others, key=lambda index: self._seconds[index] + self._leave[index])
            seconds = self._seconds[best] + self._leave[best] + self._enter[receiver]
            yield _Move(receiver, seconds, self._stop(best, layer))

    def _take(self, move: _Move, layer: int) -> None:
        if move.seconds <= self._seconds[move.run] + EQUAL_SECONDS and move.seconds < inf:
            self._seconds[move.run] = move.seconds
            self._since[move.run], self._before[move.run] = layer, move.before

    def _stop(self, index: int, end: int) -> _Stop:
        return _Stop(self._before[index], index, self._since[index], end)

    def _hops(self, stop: _Stop | None) -> tuple[Hop, ...]:
        hops: list[Hop] = []
        while stop:
            hops.append(Hop(self._runs[stop.run].node.node_id, LayerRange(stop.start, stop.end)))
            stop = stop.before
        return tuple(reversed(hops))
