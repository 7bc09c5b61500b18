"""Where the regions of a KV cache lie, and that what they hold survives every move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import KvFull
from services.node.core.regions import Move, Region, Regions

NUM_BLOCKS = 12


def apply(blocks: list[str], moves: tuple[Move, ...]) -> None:
    """Block by block in the order that reads each before it is written over."""
    for move in moves:
        steps = range(move.num_blocks)
        for step in steps if move.target < move.source else reversed(steps):
            blocks[move.target + step] = blocks[move.source + step]


@given(steps=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, NUM_BLOCKS), st.booleans()), max_size=40))
def test_what_fits_always_finds_a_place_and_contents_stay(steps: list[tuple[str, int, bool]]) -> None:
    """Each step grows a session to a number of blocks, cuts it back, or frees it (0). Blocks hold the names of their
    owners."""
    regions, held, blocks = Regions(NUM_BLOCKS), {name: Region() for name in "abcde"}, [""] * NUM_BLOCKS
    for name, wanted, shrinks in steps:
        region, before = held[name], held[name].num_blocks
        fits = wanted - before <= regions.num_free
        if wanted == 0:
            regions.release(region)
        elif shrinks:
            regions.shrink(region, wanted)
            assert region.num_blocks == min(wanted, before)
        elif fits:
            apply(blocks, regions.grow(region, wanted))
            assert region.num_blocks == max(wanted, before)
            for block in range(region.start + before, region.end):
                blocks[block] = name
        else:
            with pytest.raises(KvFull):
                regions.grow(region, wanted)
            assert region.num_blocks == before
        regions.check_integrity()
        assert sum(region.num_blocks for region in held.values()) + regions.num_free == NUM_BLOCKS
        for other, region in held.items():
            assert blocks[region.start : region.end] == [other] * region.num_blocks


def test_a_region_grows_in_place_while_there_is_room_behind_it() -> None:
    regions, a, b = Regions(8), Region(), Region()
    regions.grow(a, 1)
    regions.grow(b, 1)
    assert regions.grow(a, 3) == regions.grow(b, 3) == ()
    assert regions.grow(a, 4) == ()
    assert regions.grow(b, 4) == ()
    with pytest.raises(KvFull):
        regions.grow(b, 5)


def test_regions_move_apart_before_one_is_refused() -> None:
    regions, held = Regions(6), [Region() for _ in range(3)]
    for region in held:
        regions.grow(region, 2)
    regions.release(held[0])
    regions.release(held[2])
    assert regions.grow(held[0], 3) == (Move(2, 0, 2),)
    assert regions.grow(held[1], 3) == (Move(2, 3, 3),)
    assert regions.num_free == 0
    regions.check_integrity()


def test_what_is_kept_lies_close_and_leaves_the_room_to_what_grows() -> None:
    regions, kept, a, b = Regions(12), [Region() for _ in range(3)], Region(), Region()
    for region in kept:
        regions.grow(region, 3)
        regions.shrink(region, 2)
    regions.grow(a, 1)
    regions.grow(b, 1)
    # Once they have moved apart, both have room for half of what is left.
    while a.num_blocks < 3:
        regions.grow(a, a.num_blocks + 1)
    assert regions.grow(b, 3) == regions.grow(b, 2) == ()
    regions.check_integrity()
    # One that is continued has room again.
    regions.release(a)
    regions.release(b)
    regions.grow(kept[0], 7)
    assert regions.grow(kept[0], 8) == ()
    assert regions.num_free == 0


def test_integrity_notices_a_block_that_is_given_out_twice_or_lost() -> None:
    regions, a, b = Regions(8), Region(), Region()
    regions.grow(a, 2)
    regions.grow(b, 2)
    b.start = a.start + 1
    with pytest.raises(AssertionError):
        regions.check_integrity()
    b.start, regions.num_free = 4, 5
    with pytest.raises(AssertionError):
        regions.check_integrity()
