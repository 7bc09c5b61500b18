"""How a run of layers is cut into pieces: fewest nodes, then the smallest largest stage, pieces contiguous.

::

    run 0-30, room for 12 / 12 / 12   ->  0-10  10-20  20-30
    run 0-30, room for  5 / 30 / 30   ->  0-5   5-18   18-30
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from meshnet.model import LayerRange

# Enough to try every subset of up to nine nodes; beyond that the roomiest come first.
MAX_SUBSETS = 128


@dataclass(frozen=True, slots=True)
class Bin:
    """A node that could take layers of a run. `room` in bytes; `prefix` as in Costs; `num_held`: layers of the model
    that it holds already; `before` and `after`: it holds the layer on that side of the run."""

    node_id: str
    room: int
    prefix: Sequence[int]
    num_held: int = 0
    before: bool = False
    after: bool = False

    def reach(self, start: int, end: int, most: int) -> int:
        """One past the last layer it can take from `start` on, taking at most `most`."""
        fits = bisect_right(self.prefix, self.room + self.prefix[start]) - 1
        return max(start, min(end, fits, start + max(0, most)))

    def max_layers(self, run: LayerRange) -> int:
        """No piece of the run on this node can have more layers."""
        room, count = self.room, 0
        for size in sorted(self.prefix[i + 1] - self.prefix[i] for i in run.layers):
            room -= size
            if room < 0:
                break
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class Piece:
    node_id: str
    layers: LayerRange


def arrange(bins: Sequence[Bin], run: LayerRange, slack: float, lead: Bin | None = None) -> tuple[Piece, ...] | None:
    """The best cut of a run, or None if it does not fit. `lead`, if given, takes the first piece."""
    roomy = sorted(bins, key=lambda b: (-b.max_layers(run), -b.room, b.node_id))
    most = [b.max_layers(run) for b in roomy]
    for count in range(1, len(roomy) + 1):
        if sum(most[:count]) < len(run):
            continue
        options = [cut for order in _orders(roomy, run, count, lead) if (cut := split(order, run)) is not None]
        if options:
            return _best(options, bins, slack)
    return None


def split(order: Sequence[Bin], run: LayerRange) -> tuple[Piece, ...] | None:
    """Pieces for the bins in this order, as equal as fits; None if the run does not fit."""
    pieces: list[Piece] = []
    start = run.start
    for index, candidate in enumerate(order):
        level = _lowest_level(order[index:], LayerRange(start, run.end))
        if level is None:
            return None
        end = candidate.reach(start, run.end, level - candidate.num_held)
        if end > start:
            pieces.append(Piece(candidate.node_id, LayerRange(start, end)))
        start = end
        if start == run.end:
            return tuple(pieces)
    return None


def fill(order: Iterable[Bin], run: LayerRange) -> tuple[Piece, ...]:
    """As much of the run as fits when each bin in turn takes all it can."""
    pieces: list[Piece] = []
    start = run.start
    for candidate in order:
        end = candidate.reach(start, run.end, len(run))
        if end > start:
            pieces.append(Piece(candidate.node_id, LayerRange(start, end)))
            start = end
        if start == run.end:
            break
    return tuple(pieces)


def _lowest_level(order: Sequence[Bin], run: LayerRange) -> int | None:
    """The smallest number of layers a node, counting those it has, with which the run fits."""
    low, high = 1, len(run) + max(b.num_held for b in order)
    if not _fits(order, run, high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(order, run, middle) else (middle + 1, high)
    return low


def _fits(order: Sequence[Bin], run: LayerRange, level: int) -> bool:
    start = run.start
    for candidate in order:
        start = candidate.reach(start, run.end, level - candidate.num_held)
        if start == run.end:
            return True
    return False


def _orders(roomy: Sequence[Bin], run: LayerRange, count: int, lead: Bin | None) -> Iterator[tuple[Bin, ...]]:
    if lead is not None:
        others = [b for b in roomy if b is not lead]
        subsets = islice(combinations(others, count - 1), MAX_SUBSETS)
        yield from ((lead, *_by_side(subset)) for subset in subsets)
        return
    yield from (tuple(_by_side(subset)) for subset in islice(combinations(roomy, count), MAX_SUBSETS))
    # Layers of unequal size, above all the entry weights in layer 0, can make the order decide whether the run fits.
    roomiest = roomy[:count]
    for first in roomiest:
        yield (first, *(b for b in roomiest if b is not first))
    yield tuple(reversed(roomiest))
    yield tuple(sorted(roomiest, key=lambda b: b.node_id))


def _by_side(subset: Iterable[Bin]) -> list[Bin]:
    """Nodes that hold the layers before the run first, those that hold the layers behind it last."""
    return sorted(subset, key=lambda b: (b.after and not b.before, not b.before, b.node_id))


def _best(options: Sequence[tuple[Piece, ...]], bins: Sequence[Bin], slack: float) -> tuple[Piece, ...]:
    by_id = {b.node_id: b for b in bins}
    largest_now = max(b.num_held for b in bins)

    def largest_piece(cut: tuple[Piece, ...]) -> int:
        return max(by_id[p.node_id].num_held + len(p.layers) for p in cut)

    def bottleneck(cut: tuple[Piece, ...]) -> int:
        return max(largest_now, largest_piece(cut))

    def num_hops_saved(cut: tuple[Piece, ...]) -> int:
        return int(by_id[cut[0].node_id].before) + int(by_id[cut[-1].node_id].after)

    limit = slack * min(map(bottleneck, options))
    near = [cut for cut in options if bottleneck(cut) <= limit]
    return min(near, key=lambda cut: (len(cut), -num_hops_saved(cut), largest_piece(cut)))
