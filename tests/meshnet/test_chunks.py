"""Prompts are cut so that neither a stage reads its weights too often nor the next one waits too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshnet.chunks import CHUNK_TOKENS, LARGE_CHUNK_TOKENS, chunk_tokens

TOKENS, STAGES = st.integers(1, 200_000), st.integers(1, 40)


@given(TOKENS, STAGES)
def test_later_stages_wait_for_little_of_the_time(tokens: int, stages: int) -> None:
    """Even where a step takes as long by the token whatever its length, a large chunk costs less than a quarter."""

    def steps(chunk: int) -> float:
        return (-(-tokens // chunk) + stages - 1) * chunk

    assert steps(chunk_tokens(tokens, stages)) <= 1.25 * steps(CHUNK_TOKENS)


@given(STAGES)
def test_long_prompts_have_large_chunks_and_short_ones_small_ones(stages: int) -> None:
    assert chunk_tokens(200_000, stages) == LARGE_CHUNK_TOKENS
    assert chunk_tokens(512, stages) == CHUNK_TOKENS
