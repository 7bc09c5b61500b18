"""Cuts that move the fewest bytes: a layer takes fewer bytes at a lighter quantization.

Where all nodes store layers alike every cut moves the same, and shape alone decides. Else a small case is searched
whole; in a large one nodes of heavier quantizations are brought in only when the lighter ones do not suffice.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from meshnet.model import LayerRange
from services.tracker.placement.bins import Bin
from services.tracker.placement.cut import Cut, Piece, arrange, most_layers

MAX_SEARCHED_BINS = 6
MAX_SEARCHED_LAYERS = 16
MAX_STEPS = 10_000


def arrange_cheaply(bins: Sequence[Bin], run: LayerRange, slack: float) -> Cut | None:
    """The cut of the run that moves the fewest bytes, or None if it does not fit."""
    most = most_layers(bins, run)
    if sum(most.values()) < len(run):
        return None
    roomy = [b for b in bins if most[b.node_id]]
    weights = sorted({b.moved(run) for b in roomy})
    is_small = len(roomy) <= MAX_SEARCHED_BINS and len(run) <= MAX_SEARCHED_LAYERS
    if len(weights) > 1 and is_small:
        found = search(roomy, run)
        if found is not None:
            return found
    for heaviest in weights:
        cut = arrange([b for b in bins if b.moved(run) <= heaviest], run, slack)
        if cut is not None:
            return cut
    return search(roomy, run) if is_small else None


def search(bins: Sequence[Bin], run: LayerRange) -> Cut | None:
    """Every cut of the run into consecutive pieces, each on a node of its own; None if none fits, or in a large case.

    Dijkstra over (layers placed, nodes used): fewest bytes, then fewest pieces, then the quickest slowest stage, then
    fewest pieces that must be fetched."""
    queue: list[tuple[int, int, int, int, int, int, int, Cut]] = [(0, 0, 0, 0, 0, run.start, 0, ())]
    done: set[tuple[int, int]] = set()
    num_steps = 0
    while queue and num_steps < MAX_STEPS:
        moved, num_pieces, slowest, num_fetched, _, start, used, cut = heapq.heappop(queue)
        if start == run.end:
            return cut
        if (start, used) in done:
            continue
        done.add((start, used))
        for bit, b in enumerate(bins):
            if used >> bit & 1:
                continue
            for end in range(b.reach(start, run.end), start, -1):
                num_steps += 1
                layers = LayerRange(start, end)
                stage = max(slowest, b.stage_nanoseconds(layers))
                rank = (moved + b.moved(layers), num_pieces + 1, stage, num_fetched + b.fetches, num_steps)
                heapq.heappush(queue, (*rank, end, used | 1 << bit, (*cut, Piece(b, layers))))
    return None
