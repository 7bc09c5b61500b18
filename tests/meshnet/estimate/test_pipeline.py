"""The model of a route as a pipeline: its limits, and what must hold of any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.chunks import CHUNK_TOKENS, LARGE_CHUNK_TOKENS, chunk_tokens
from meshnet.estimate.pipeline import (
    FrameCosts,
    Machine,
    Pipeline,
    Way,
    frame_seconds,
    prefill,
    tokens_per_second,
)
from tests.meshnet.estimate.pipelines import PIPELINES, pipeline

STREAMS = st.integers(1, 70)
CACHED = st.floats(0, 4096)
PROMPTS = st.integers(1, 5000)


def rate(route: Pipeline, streams: int, cached: float = 0.0, **machines: Machine) -> float:
    return tokens_per_second([route], machines, streams, cached).tokens_per_second


def slower(route: Pipeline, delay: float, share: float) -> Pipeline:
    """With links that take longer, or let less through."""

    def worse(way: Way) -> Way:
        return Way(way.seconds + delay, way.bytes_per_second and way.bytes_per_second * share)

    return replace(route, ways=tuple(map(worse, route.ways)), back=route.back and worse(route.back))


def test_one_node_has_no_links_and_takes_its_step() -> None:
    route = pipeline(0.5, each=0.01, head=0.1)
    assert frame_seconds(route, 1, 0) == pytest.approx(0.6)
    assert rate(route, 1) == pytest.approx(1 / 0.6)
    # Up to 50 rows cost no more than one.
    assert rate(route, 50) == pytest.approx(50 / 0.6)
    assert rate(route, 1000) == pytest.approx(1000 / 10.1)


def test_a_lone_stream_waits_for_all_stages_and_hops() -> None:
    route = pipeline(0.1, 0.2, 0.3, way=Way(0.01, 2048 * 100), head=0.05, frames=FrameCosts(0.001, 0.002, 0.004))
    # Three hops: two on, and one straight back; each takes 2048 bytes, 10 ms of them.
    assert frame_seconds(route, 1, 0) == pytest.approx(0.6 + 3 * (0.01 + 0.01 + 0.004) + 0.05 + 0.003)
    assert rate(route, 1) == pytest.approx(1 / frame_seconds(route, 1, 0))


def test_as_many_streams_as_stages_keep_the_slowest_at_work() -> None:
    found = tokens_per_second([pipeline(0.1, 0.1, 0.2)], {}, 3, 0)
    assert found.tokens_per_second == pytest.approx(1 / 0.2)
    assert found.limit == "steps of n2"
    # Four rows in two of the frames and three in one cost no more than one row each.
    assert rate(pipeline(0.1, 0.1, 0.2), 11) == pytest.approx(11 / 0.6)


def test_what_is_cached_is_read_for_each_session() -> None:
    assert frame_seconds(pipeline(0.1, cached=1e-4), 4, 1000) == pytest.approx(0.1 + 0.4)


def test_a_thin_link_is_the_limit() -> None:
    route = replace(pipeline(0.001, 0.001, 0.001, way=Way(0, 2048 * 10)), back=Way())
    found = tokens_per_second([route], {}, 30, 0)
    assert found.tokens_per_second == pytest.approx(10)
    assert found.limit == "link from n0"


def test_nodes_of_one_machine_take_turns_at_its_cores_and_memory() -> None:
    route = pipeline(0.1, 0.1, 0.1, 0.1, machine="m")
    assert rate(route, 4) == pytest.approx(10)
    two = tokens_per_second([route], {"m": Machine(cores=2)}, 4, 0)
    assert two.tokens_per_second == pytest.approx(5)
    assert two.limit == "cores of m"
    # A stage reads 0.1 GB in a step.
    memory = tokens_per_second([route], {"m": Machine(bytes_per_second=1e9)}, 4, 0)
    assert memory.tokens_per_second == pytest.approx(2.5)
    assert memory.limit == "memory of m"
    # Alone, a stream meets nobody.
    assert rate(route, 1, m=Machine(1, 1e9)) == pytest.approx(2.5)


def test_routes_that_share_nothing_add_up_and_others_take_turns() -> None:
    one, two = pipeline(0.1), pipeline(0.1)
    elsewhere = replace(two, stages=(replace(two.stages[0], node_id="other"),))
    assert tokens_per_second([one, elsewhere], {}, 2, 0).tokens_per_second == pytest.approx(20)
    assert tokens_per_second([one, two], {}, 2, 0).tokens_per_second == pytest.approx(10)


def test_chunks_of_a_prompt_follow_each_other() -> None:
    # Three stages of 1 s: the first chunk takes 3 s, each of the others one more.
    assert prefill(pipeline(1, 1, 1), {}, 4 * CHUNK_TOKENS).seconds == pytest.approx(6)
    found = prefill(pipeline(1, 2, 1, way=Way(0.5, None), head=0.25), {}, 4 * CHUNK_TOKENS)
    assert found.seconds == pytest.approx(1 + 0.5 + 4 * 2 + 0.5 + 1)
    assert found.first_token_seconds == pytest.approx(found.seconds + 0.5 + 0.25)
    assert found.tokens_per_second == pytest.approx(4 * CHUNK_TOKENS / 11)


def test_a_prompt_can_wait_for_a_link_or_for_the_cores() -> None:
    chunk_bytes = CHUNK_TOKENS * 1024 * 2
    thin = prefill(pipeline(0.1, 0.1, way=Way(0, chunk_bytes / 3)), {}, 4 * CHUNK_TOKENS)
    assert thin.seconds == pytest.approx(0.1 + 4 * 3 + 0.1)
    one_core = prefill(pipeline(1, 1, 1, machine="m"), {"m": Machine(cores=1)}, 4 * CHUNK_TOKENS)
    assert one_core.seconds == pytest.approx(12)


def test_no_more_than_sixteen_chunks_are_under_way() -> None:
    far = pipeline(0.001, 0.001, way=Way(10, None))
    assert prefill(far, {}, 16 * LARGE_CHUNK_TOKENS).seconds == pytest.approx(10, rel=0.01)
    assert prefill(far, {}, 17 * LARGE_CHUNK_TOKENS).seconds == pytest.approx(30, rel=0.01)


@given(PIPELINES, STREAMS, CACHED)
def test_more_streams_never_lower_throughput(route: Pipeline, streams: int, cached: float) -> None:
    assert rate(route, streams + 1, cached) >= rate(route, streams, cached) * (1 - 1e-9)


@given(PIPELINES, STREAMS, CACHED)
def test_shared_machines_never_help_nor_do_many_streams_speed_up_one(
    route: Pipeline, streams: int, cached: float
) -> None:
    together = replace(route, stages=tuple(replace(stage, machine="m") for stage in route.stages))
    shared = rate(together, streams, cached, m=Machine(1.5, 2e8))
    assert shared <= rate(route, streams, cached) * (1 + 1e-9)
    assert rate(route, streams, cached) <= streams * rate(route, 1, cached) * (1 + 1e-9)


@given(PIPELINES, STREAMS, CACHED, PROMPTS, st.floats(0, 1), st.floats(0.01, 1))
def test_a_slower_link_never_helps(
    route: Pipeline, streams: int, cached: float, tokens: int, delay: float, share: float
) -> None:
    worse = slower(route, delay, share)
    assert rate(worse, streams, cached) <= rate(route, streams, cached) * (1 + 1e-9)
    assert prefill(worse, {}, tokens).first_token_seconds >= prefill(route, {}, tokens).first_token_seconds * (1 - 1e-9)


@given(PIPELINES, PROMPTS)
def test_a_longer_prompt_takes_longer_and_never_less_than_its_work(route: Pipeline, tokens: int) -> None:
    found = prefill(route, {}, tokens)
    chunk = chunk_tokens(tokens, len(route.stages))
    if chunk == chunk_tokens(tokens + 1, len(route.stages)):
        assert prefill(route, {}, tokens + 1).seconds >= found.seconds * (1 - 1e-9)
    slowest = max(stage.costs.chunk.at(chunk) for stage in route.stages)
    assert found.seconds >= (tokens // chunk) * slowest * (1 - 1e-9)
