"""Cuts that move the fewest bytes: a layer takes fewer bytes at a lighter quantization.

Where all nodes store layers alike every cut moves the same, and shape alone decides. Else a small case is searched
whole; in a large one nodes of heavier quantizations are brought in only when the lighter ones do not suffice.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from meshnet.model import LayerRange
from services.tracker.placement.bins import Bin
from services.tracker.placement.cut import Cut, Piece, arrange

MAX_SEARCHED_BINS = 6
MAX_STEPS = 20_000


def arrange_cheaply(bins: Sequence[Bin], run: LayerRange, slack: float) -> Cut | None:
    """The cut of the run that moves the fewest bytes, or None if it does not fit."""
    roomy = [b for b in bins if b.reach(run.start, run.end) > run.start or _fits_some(b, run)]
    weights = sorted({b.moved(run) for b in roomy})
    if len(weights) > 1 and len(roomy) <= MAX_SEARCHED_BINS:
        found = search(roomy, run)
        if found is not None:
            return found
    for heaviest in weights:
        cut = arrange([b for b in bins if b.moved(run) <= heaviest], run, slack)
        if cut is not None:
            return cut
    return search(roomy, run) if len(roomy) <= MAX_SEARCHED_BINS else None


def _fits_some(b: Bin, run: LayerRange) -> bool:
    return any(b.sizes[i + 1] - b.sizes[i] <= b.room for i in run.layers)


def search(bins: Sequence[Bin], run: LayerRange) -> Cut | None:
    """Every cut of the run into consecutive pieces, each on a node of its own; None if none fits, or in a large case.

    Dijkstra over (layers placed, nodes used): fewest bytes, then fewest pieces, then the quickest slowest stage."""
    queue: list[tuple[int, int, int, int, int, Cut]] = [(0, 0, 0, 0, run.start, ())]
    done: set[tuple[int, int]] = set()
    tie = 0
    while queue and tie < MAX_STEPS:
        moved, num_pieces, slowest, _, start, cut = heapq.heappop(queue)
        if start == run.end:
            return cut
        used = frozenset(piece.node.node_id for piece in cut)
        mask = sum(1 << i for i, b in enumerate(bins) if b.node_id in used)
        if (start, mask) in done:
            continue
        done.add((start, mask))
        for b in (b for b in bins if b.node_id not in used):
            for end in range(b.reach(start, run.end), start, -1):
                tie += 1
                layers = LayerRange(start, end)
                stage = max(slowest, b.stage_nanoseconds(layers))
                heapq.heappush(
                    queue, (moved + b.moved(layers), num_pieces + 1, stage, tie, end, (*cut, Piece(b, layers)))
                )
    return None
