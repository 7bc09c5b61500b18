"""Compression pays on slow links, and on fast ones it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.wire import Encoding
from services.node.core.compression import MIN_BYTES, Compression, CompressionChoice

MBIT = 1e6 / 8
CHUNK = 128 * 576 * 2


@pytest.mark.parametrize(("mbit", "encoding"), [(10, Encoding.ZSTD), (100, Encoding.ZSTD), (1000, None), (9000, None)])
def test_it_pays_below_a_few_hundred_megabits(mbit: float, encoding: Encoding | None) -> None:
    assert CompressionChoice(Compression.AUTO).choose(CHUNK, mbit * MBIT) is encoding


def test_what_is_not_known_or_small_is_sent_as_it_is() -> None:
    choice = CompressionChoice(Compression.AUTO)
    assert choice.choose(CHUNK, None) is None
    assert choice.choose(MIN_BYTES - 1, MBIT) is None


@pytest.mark.parametrize("rate", [None, MBIT, 1e12])
def test_what_is_set_holds_for_every_link(rate: float | None) -> None:
    assert CompressionChoice(Compression.OFF).choose(CHUNK, rate) is None
    assert CompressionChoice(Compression.ZSTD).choose(1, rate) is Encoding.ZSTD


def test_it_learns_what_it_costs_here() -> None:
    """A core that compresses at 5 MB/s is slower than a link of 100 Mbit/s; noise does not get smaller."""
    slow, noise = CompressionChoice(Compression.AUTO), CompressionChoice(Compression.AUTO)
    for _ in range(100):
        slow.observe(CHUNK, CHUNK // 2, CHUNK / 5e6)
        noise.observe(CHUNK, CHUNK, CHUNK / 700e6)
    assert slow.choose(CHUNK, 100 * MBIT) is None
    assert noise.choose(CHUNK, MBIT) is None


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_what_pays_on_a_link_pays_on_a_slower_one(a: float, b: float) -> None:
    choice = CompressionChoice(Compression.AUTO)
    if choice.choose(CHUNK, max(a, b)):
        assert choice.choose(CHUNK, min(a, b)) is Encoding.ZSTD
