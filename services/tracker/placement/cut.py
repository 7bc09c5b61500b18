"""How a run of layers is cut into pieces: fewest nodes, then the quickest slowest stage, pieces contiguous.

::

    run 0-30, room for 12 / 12 / 12   ->  0-10  10-20  20-30
    run 0-30, room for  5 / 30 / 30   ->  0-5   5-18   18-30
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, islice

from meshnet.model import LayerRange
from services.tracker.placement.bins import Bin

# Every subset of up to nine nodes is tried; of more, the roomiest.
MAX_SUBSETS = 128
FEW = 9
SOME_SUBSETS = 12
# Stages that differ by less than this share of the slowest count as equally quick.
LEVEL_SHARE = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    node: Bin
    layers: LayerRange


Cut = tuple[Piece, ...]


def arrange(bins: Sequence[Bin], run: LayerRange, slack: float, lead: Bin | None = None) -> Cut | None:
    """The best cut of a run, or None if it does not fit. `lead`, if given, takes the first piece."""
    most = most_layers(bins, run)
    roomy = sorted(bins, key=lambda b: (-most[b.node_id], -b.room, b.fetches, b.node_id))
    reached = list(accumulate(most[b.node_id] for b in roomy))
    enough = bisect_left(reached, len(run)) + 1
    for count in _counts(enough, len(roomy)):
        options = [cut for order in _orders(roomy, count, lead) if (cut := split(order, run)) is not None]
        if options:
            best = _best(options, bins, slack)
            return evened([piece.node for piece in best], run) or best
    return None


def _counts(enough: int, most: int) -> Iterator[int]:
    """How many nodes to try: each number if there are few, else in growing steps."""
    step = 1
    while enough < most:
        yield enough
        enough += step
        step = 1 if most <= FEW else 2 * step
    if enough == most or step > 1:
        yield most


def split(order: Sequence[Bin], run: LayerRange) -> Cut | None:
    """Pieces for the bins in this order, so that the slowest stage is as quick as can be; None if it does not fit."""
    level = _lowest_level(order, run)
    return None if level is None else _filled(order, run, level)


def evened(order: Sequence[Bin], run: LayerRange) -> Cut | None:
    """As `split`, and the other stages too are as quick as can be once those before them are set."""
    pieces: list[Piece] = []
    start = run.start
    for index, candidate in enumerate(order):
        rest = split(order[index:], LayerRange(start, run.end))
        if rest is None:
            return None
        if rest[0].node is candidate:
            pieces.append(rest[0])
            start = rest[0].layers.end
        if start == run.end:
            return tuple(pieces)
    return None


def fill(order: Iterable[Bin], run: LayerRange, level: int | None = None) -> Cut:
    """As much of the run as fits when each bin in turn takes all it can, its stage `level` nanoseconds at most."""
    pieces: list[Piece] = []
    start = run.start
    for candidate in order:
        end = candidate.reach(start, run.end, level)
        if end > start:
            pieces.append(Piece(candidate, LayerRange(start, end)))
            start = end
        if start == run.end:
            break
    return tuple(pieces)


def scatter(bins: Sequence[Bin], run: LayerRange) -> Cut | None:
    """Layer by layer to the first node with room: many pieces, but where layers
    are of unequal size this may fit where consecutive pieces do not. None if it does not fit either."""
    by_id = sorted(bins, key=lambda b: (b.fetches, b.node_id))
    roomy = sorted(bins, key=lambda b: (-b.room, b.fetches, b.node_id))
    for order in (by_id, roomy, roomy[::-1]):
        room = {b.node_id: b.room for b in order}
        takers: list[Bin] = []
        for layer in run.layers:
            fits = (b for b in order if b.sizes[layer + 1] - b.sizes[layer] <= room[b.node_id])
            taker = next(fits, None)
            if taker is None:
                break
            room[taker.node_id] -= taker.sizes[layer + 1] - taker.sizes[layer]
            takers.append(taker)
        else:
            return _joined(takers, run.start)
    return None


def _joined(takers: Sequence[Bin], start: int) -> Cut:
    """One taker a layer, from `start` on, as pieces."""
    pieces: list[Piece] = []
    for layer, taker in enumerate(takers, start):
        if pieces and pieces[-1].node is taker:
            pieces[-1] = Piece(taker, LayerRange(pieces[-1].layers.start, layer + 1))
        else:
            pieces.append(Piece(taker, LayerRange(layer, layer + 1)))
    return tuple(pieces)


def _filled(order: Sequence[Bin], run: LayerRange, level: int | None = None) -> Cut | None:
    """As `fill`, or None if that is not all of the run."""
    cut = fill(order, run, level)
    return cut if cut and cut[-1].layers.end == run.end else None


def _lowest_level(order: Sequence[Bin], run: LayerRange) -> int | None:
    """The time of the slowest stage, in nanoseconds, below which the run does not fit, give or take a thousandth."""
    greedy = _filled(order, run)
    if greedy is None:
        return None
    low, high = 0, max(piece.node.stage_nanoseconds(piece.layers) for piece in greedy) + 1
    while high - low > 1 + high // LEVEL_SHARE:
        middle = (low + high) // 2
        if _filled(order, run, middle) is None:
            low = middle
        else:
            high = middle
    return high


def most_layers(bins: Sequence[Bin], run: LayerRange) -> dict[str, int]:
    """By node: no piece of the run on it can have more layers. Counted with the smallest layers first."""
    smallest: dict[object, list[int]] = {}
    most: dict[str, int] = {}
    for b in bins:
        if b.quantization not in smallest:
            sizes = sorted(b.sizes[i + 1] - b.sizes[i] for i in run.layers)
            smallest[b.quantization] = list(accumulate(sizes))
        most[b.node_id] = bisect_right(smallest[b.quantization], b.room)
    return most


def _orders(roomy: Sequence[Bin], count: int, lead: Bin | None) -> Iterator[tuple[Bin, ...]]:
    limit = MAX_SUBSETS if len(roomy) <= FEW else SOME_SUBSETS
    if lead is not None:
        others = [b for b in roomy if b is not lead]
        subsets = islice(combinations(others, count - 1), limit)
        yield from ((lead, *_by_side(subset)) for subset in subsets)
        return
    yield from (tuple(_by_side(subset)) for subset in islice(combinations(roomy, count), limit))
    # Layers of unequal size, above all the entry weights in layer 0, can make the order decide whether the run fits.
    roomiest = roomy[:count]
    for first in roomiest[:SOME_SUBSETS]:
        yield (first, *(b for b in roomiest if b is not first))
    yield tuple(reversed(roomiest))
    yield tuple(sorted(roomiest, key=lambda b: b.node_id))


def _by_side(subset: Iterable[Bin]) -> list[Bin]:
    """Nodes that hold the layers before the run first, those that hold the layers behind it last."""
    return sorted(subset, key=lambda b: (b.after and not b.before, not b.before, b.node_id))


def _best(options: Sequence[Cut], bins: Sequence[Bin], slack: float) -> Cut:
    slowest_now = max(b.stage_nanoseconds() for b in bins)

    def slowest_piece(cut: Cut) -> int:
        return max(p.node.stage_nanoseconds(p.layers) for p in cut)

    def bottleneck(cut: Cut) -> int:
        return max(slowest_now, slowest_piece(cut))

    def num_hops_saved(cut: Cut) -> int:
        return int(cut[0].node.before) + int(cut[-1].node.after)

    def num_fetched(cut: Cut) -> int:
        return sum(piece.node.fetches for piece in cut)

    limit = slack * min(map(bottleneck, options))
    near = [cut for cut in options if bottleneck(cut) <= limit]
    return min(near, key=lambda cut: (len(cut), -num_hops_saved(cut), slowest_piece(cut), num_fetched(cut)))
