"""Where each session's part of a KV cache lies: contiguous regions of a fixed number of blocks. Pure.

A region is contiguous so that attention reads it in place. It grows in place while there is room behind it::

    blocks | a a a . . | b b . . | c . . . . |      a grows by 2 in place; by 3 it moves, or all move apart

A region that has been cut back to what is kept of it needs no room behind it, until it grows again.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.errors import KvFull


@dataclass(slots=True, eq=False)
class Region:
    """Blocks `[start, end)`. An empty one lies nowhere. Changed by its `Regions` only, also when another one grows.

    `grows`: whether room is left behind it.
    """

    start: int = 0
    num_blocks: int = 0
    grows: bool = True

    @property
    def end(self) -> int:
        return self.start + self.num_blocks


@dataclass(frozen=True, slots=True)
class Move:
    """The contents of `num_blocks` blocks go from `source` on to `target` on, which may overlap."""

    source: int
    target: int
    num_blocks: int


class Regions:
    """All regions of one KV cache of `num_blocks` blocks.

    Invariant (`check_integrity`): no block is in two regions, and the blocks of all regions plus the free ones are all.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._placed: list[Region] = []  # in the order in which they lie, without empty ones

    def grow(self, region: Region, num_blocks: int) -> tuple[Move, ...]:
        """Gives a region that many blocks in all, if it has fewer. Returns what must be copied, in this order.

        Regions move apart rather than refuse, so it raises KvFull, and changes nothing, only if too few are free.
        """
        extra = num_blocks - region.num_blocks
        if extra <= 0:
            return ()
        if extra > self.num_free:
            raise KvFull(f"{extra} more blocks are wanted, {self.num_free} of {self.num_blocks} are free")
        self.num_free -= extra
        region.grows = True
        others = [other for other in self._placed if other is not region]
        if region.num_blocks and self._room_behind(region) >= extra:
            region.num_blocks = num_blocks
            return ()
        moves = self._place_in_gap(region, num_blocks, others)
        return self._spread(region, num_blocks) if moves is None else moves

    def shrink(self, region: Region, num_blocks: int) -> None:
        """Takes the blocks behind the first `num_blocks` of a region back, and leaves it no room to grow."""
        region.grows = False
        if not num_blocks:
            self.release(region)
        elif num_blocks < region.num_blocks:
            self.num_free += region.num_blocks - num_blocks
            region.num_blocks = num_blocks

    def release(self, region: Region) -> None:
        """Takes all blocks of a region back."""
        self._placed = [other for other in self._placed if other is not region]
        self.num_free += region.num_blocks
        region.start = region.num_blocks = 0

    def check_integrity(self) -> None:
        """Raises AssertionError if a block was lost or given out twice."""
        end = used = 0
        for region in self._placed:
            assert region.num_blocks > 0, "an empty region is placed"
            assert region.start >= end, f"a region begins at block {region.start}, the one before it ends at {end}"
            end, used = region.end, used + region.num_blocks
        assert end <= self.num_blocks, f"a region ends at block {end} of {self.num_blocks}"
        assert used + self.num_free == self.num_blocks, f"{used} used + {self.num_free} free != {self.num_blocks}"

    def _room_behind(self, region: Region) -> int:
        return min((o.start for o in self._placed if o.start >= region.end), default=self.num_blocks) - region.end

    def _place_in_gap(self, region: Region, num_blocks: int, others: list[Region]) -> tuple[Move, ...] | None:
        """Into the largest gap between the others. None: that is too small."""
        begins = [0, *(other.end for other in others)]
        ends = [*(other.start for other in others), self.num_blocks]
        size, index = max((end - begin, -index) for index, (begin, end) in enumerate(zip(begins, ends, strict=True)))
        if size < num_blocks:
            return None
        # Half of what is left stays for the region before, so that both can grow in place.
        shared = index and others[-index - 1].grows
        start = begins[-index] + ((size - num_blocks) // 2 if shared else 0)
        moves = _moves([(region, start)])
        region.start, region.num_blocks = start, num_blocks
        self._placed = sorted([*others, region], key=lambda placed: placed.start)
        return moves

    def _spread(self, region: Region, num_blocks: int) -> tuple[Move, ...]:
        """Moves all regions apart, with equal room behind each that grows: so many tokens pass before it is needed
        again."""
        order = self._placed if region.num_blocks else [*self._placed, region]
        sizes = [num_blocks if placed is region else placed.num_blocks for placed in order]
        free, starts = self.num_free, []
        growing = sum(placed.grows for placed in order)
        start = 0
        for placed, size in zip(order, sizes, strict=True):
            starts.append(start)
            start += size
            if placed.grows:
                room = free // growing
                growing, free, start = growing - 1, free - room, start + room
        moves = _moves(list(zip(order, starts, strict=True)))
        for placed, start, size in zip(order, starts, sizes, strict=True):
            placed.start, placed.num_blocks = start, size
        self._placed = order
        return moves


def _moves(targets: list[tuple[Region, int]]) -> tuple[Move, ...]:
    """Of regions that keep their order. Those that go left come first, from the left, then the others from the right:
    so none is written over before it has moved."""
    moves = [Move(region.start, start, region.num_blocks) for region, start in targets if region.num_blocks]
    left = [move for move in moves if move.target < move.source]
    right = [move for move in moves if move.target > move.source]
    return (*left, *reversed(right))
