"""Generation over three nodes on real sockets: order, chunks, waiting, cancelling, failing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import aclosing

import pytest

from meshnet.errors import (
    InvalidRequest,
    KvFull,
    MeshnetError,
    MissingLayers,
    NextHopFailed,
    NextHopTimeout,
    PositionMismatch,
)
from meshnet.model import LayerRange
from meshnet.topology import DeployedModel, Hop
from meshnet.wire import FrameHeaders
from services.node.core.compression import Compression
from services.node.core.members import LostNode
from services.node.core.request import FinishReason, GenerationRequest, check_request
from services.node.core.work import Sampling
from tests import models
from tests.services.node.shells import NUM_LAYERS, VOCABULARY, Shell, three_nodes


def request(prompt: int = 3, new: int = 5, **more: object) -> GenerationRequest:
    tokens = tuple(index % VOCABULARY for index in range(prompt))
    return GenerationRequest(str(uuid.uuid4()), "m", tokens, new, **more)  # type: ignore[arg-type]


def expected(asked: GenerationRequest) -> list[int]:
    last, tokens = asked.prompt[-1], []
    for _ in range(asked.max_new_tokens):
        last = (last + NUM_LAYERS) % VOCABULARY
        tokens.append(last)
    return tokens


async def run(shell: Shell, asked: GenerationRequest) -> list[int]:
    return [event.token_id async for event in shell.entry.generate(asked) if event.token_id is not None]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def until_idle(nodes: dict[str, Shell]) -> None:
    """No node has a session, all room is free, and executors have no caches but what is kept."""
    for shell in nodes.values():
        await until(lambda shell=shell: len(shell.sessions) == 0 and _keeps_what_it_should(shell))  # type: ignore[misc]
        ledger = shell.sessions.ledger("m")
        assert ledger.free_tokens == ledger.capacity_tokens


def _keeps_what_it_should(shell: Shell) -> bool:
    return all(shell.sessions.kept_length(key) == length for key, length in shell.executor.cached.items())


@pytest.mark.parametrize("compression", [Compression.OFF, Compression.ZSTD])
@pytest.mark.parametrize("prompt", [1, 127, 128, 129, 1000])
async def test_every_token_runs_through_every_layer_once(prompt: int, compression: Compression) -> None:
    async with three_nodes(compression=compression) as nodes:
        asked = request(prompt)
        assert await run(nodes["a"], asked) == expected(asked)
        await until_idle(nodes)


async def test_many_at_once_get_what_each_gets_alone_and_share_steps() -> None:
    # There is room for about half of them: the others wait their turn.
    async with three_nodes(kv_tokens=6144) as nodes:
        asked = [request(prompt, 40) for prompt in (1, 5, 130, 300, 7, 64, 256, 2) * 5]
        answers = await asyncio.gather(*(run(nodes["a"], one) for one in asked))
        assert answers == [expected(one) for one in asked]
        assert max(nodes["b"].executor.steps) > 1
        await until_idle(nodes)


async def test_chunks_leave_before_the_first_has_come_back() -> None:
    async with three_nodes() as nodes:
        nodes["c"].executor.gate.clear()
        running = asyncio.create_task(run(nodes["a"], request(512, 1)))
        # The last node answers nothing, and yet all four chunks have passed through the first two.
        await until(lambda: sum(nodes["b"].executor.cached.values()) == 512)
        assert not running.done()
        nodes["c"].executor.gate.set()
        assert len(await running) == 1


async def test_a_stop_token_is_emitted_and_ends_it() -> None:
    async with three_nodes() as nodes:
        asked = request(1, 50, stop_token_ids=frozenset({36}))
        events = [event async for event in nodes["a"].entry.generate(asked)]
        assert [event.token_id for event in events] == [12, 24, 36]
        assert [event.finish_reason for event in events] == [None, None, FinishReason.STOP]


async def test_leaving_early_frees_the_session_on_every_hop() -> None:
    async with three_nodes() as nodes:
        async with aclosing(nodes["a"].entry.generate(request(200, 1000))) as events:
            async for _ in events:
                break
        await until_idle(nodes)


async def test_abort_during_prefill_stops_at_once_and_frees_every_hop() -> None:
    async with three_nodes() as nodes:
        nodes["c"].executor.gate.clear()
        asked = request(700, 10)
        running = asyncio.create_task(run(nodes["a"], asked))
        await until(lambda: len(nodes["c"].sessions) == 1)
        await nodes["a"].entry.abort(asked.request_id)
        assert await running == []
        nodes["c"].executor.gate.set()
        await until_idle(nodes)
        await nodes["a"].entry.abort(asked.request_id)


async def test_prompts_wait_in_order_for_kv_room_and_too_many_are_told_to_come_back() -> None:
    async with three_nodes(kv_tokens=256, max_waiting=2) as nodes:
        nodes["c"].executor.gate.clear()
        first = asyncio.create_task(run(nodes["a"], request(100, 100)))
        await until(lambda: len(nodes["a"].sessions) == 1)
        waiting = [asyncio.create_task(run(nodes["a"], request(100, 100))) for _ in range(2)]
        await until(lambda: nodes["a"].entry.num_running == 3)
        with pytest.raises(KvFull) as refused:
            await run(nodes["a"], request(100, 100))
        assert refused.value.retry_after > 0
        nodes["c"].executor.gate.set()
        assert [len(tokens) for tokens in await asyncio.gather(first, *waiting)] == [100, 100, 100]
        await until_idle(nodes)


async def test_waiting_for_room_has_a_deadline() -> None:
    async with three_nodes(kv_tokens=256, admission_timeout=0.2) as nodes:
        nodes["c"].executor.gate.clear()
        holder = asyncio.create_task(run(nodes["a"], request(100, 100)))
        await until(lambda: len(nodes["a"].sessions) == 1)
        with pytest.raises(KvFull, match="came free"):
            await run(nodes["a"], request(100, 100))
        nodes["c"].executor.gate.set()
        await holder


async def test_a_hop_that_is_gone_or_mute_is_named() -> None:
    async with three_nodes(hop_timeout=0.2, resume_timeout=0.1) as nodes:
        nodes["c"].executor.gate.clear()
        with pytest.raises(MissingLayers, match="layers 8-12: node c: no answer within") as mute:
            await run(nodes["a"], request())
        assert isinstance(mute.value.__cause__, NextHopTimeout)
        nodes["c"].executor.gate.set()
        await until_idle(nodes)
        await nodes["c"].server.stop()
        with pytest.raises(MissingLayers, match="layers 8-12: node c failed") as gone:
            await run(nodes["a"], request())
        assert isinstance(gone.value.__cause__, NextHopFailed)
        await until(lambda: len(nodes["a"].sessions) == len(nodes["b"].sessions) == 0)


@pytest.mark.parametrize("lost", ["b", "c"])
async def test_a_lost_hop_ends_a_generation_long_before_its_deadline(lost: str) -> None:
    async with three_nodes(hop_timeout=3600.0, resume_timeout=0.2) as nodes:
        nodes[lost].executor.gate.clear()
        running = asyncio.create_task(run(nodes["a"], request()))
        await until(lambda: len(nodes[lost].sessions) == 1)
        nodes["a"].forwarding.node_lost(LostNode("stranger", "was lost"))
        nodes["a"].forwarding.node_lost(LostNode(lost, "was lost"))
        with pytest.raises(MissingLayers, match=f"node {lost} was lost"):
            async with asyncio.timeout(20):
                await running
        nodes[lost].executor.gate.set()
        await until_idle(nodes)


async def test_a_frame_whose_session_is_freed_while_it_is_here_is_not_sent_on() -> None:
    async with three_nodes() as nodes:
        session = "00000000-0000-4000-8000-000000000002"
        nodes["b"].executor.gate.clear()
        route = (Hop("c", LayerRange(8, 12)),)
        frame = FrameHeaders(1, 1, 8, (session,), model="m", layers=LayerRange(4, 8), route=route, entry="a")
        running = asyncio.create_task(nodes["b"].forwarding.forward(frame, bytes(16)))
        await until(lambda: len(nodes["b"].sessions) == 1)
        await nodes["b"].forwarding.free(session, route)
        nodes["b"].executor.gate.set()
        with pytest.raises(PositionMismatch, match="was freed while its frame was here"):
            await running
        await until_idle(nodes)


async def test_sessions_are_freed_when_the_node_where_they_begin_is_lost() -> None:
    async with three_nodes(resume_timeout=0.1) as nodes:
        nodes["c"].executor.gate.clear()
        running = asyncio.create_task(run(nodes["a"], request()))
        await until(lambda: len(nodes["c"].sessions) == 1)
        nodes["b"].forwarding.node_lost(LostNode("c", "left the mesh"))
        with pytest.raises(MissingLayers, match="node c left the mesh"):
            await running
        nodes["c"].executor.gate.set()
        await until_idle(nodes)
        session = "00000000-0000-4000-8000-000000000001"
        frame = FrameHeaders(1, 1, 8, (session,), model="m", layers=LayerRange(4, 8), entry="a")
        await nodes["b"].forwarding.forward(frame, bytes(16))
        assert len(nodes["b"].sessions) == 1
        nodes["b"].forwarding.node_lost(LostNode("c", "was lost"))
        assert len(nodes["b"].sessions) == 1
        nodes["b"].forwarding.node_lost(LostNode("a", "was lost"))
        assert len(nodes["b"].sessions) == 0
        await until_idle(nodes)


async def test_a_step_that_fails_ends_its_generation_and_nothing_else() -> None:
    async with three_nodes(resume_timeout=0.1) as nodes:
        nodes["b"].executor.fail = ValueError("broken")
        with pytest.raises(MeshnetError):
            await run(nodes["a"], request())
        nodes["b"].executor.fail = None
        asked = request()
        assert await run(nodes["a"], asked) == expected(asked)
        await until_idle(nodes)


async def test_impossible_requests_are_refused_with_what_is_right() -> None:
    async with three_nodes(kv_tokens=512) as nodes:
        for asked, said in (
            (request(0), "empty"),
            (request(new=0), "at least 1"),
            (request(500, 100), "the limit is 512"),
            (GenerationRequest(str(uuid.uuid4()), "m", (5, 100), 1), "token id 100"),
            (request(sampling=Sampling(temperature=-1)), "temperature"),
            (request(sampling=Sampling(temperature=float("nan"))), "temperature"),
            (request(sampling=Sampling(top_p=1.5)), "top_p"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                await run(nodes["a"], asked)
        with pytest.raises(MissingLayers):
            await run(nodes["b"], request())
        await until_idle(nodes)


async def test_the_same_generation_cannot_run_twice() -> None:
    async with three_nodes() as nodes:
        nodes["c"].executor.gate.clear()
        asked = request()
        running = asyncio.create_task(run(nodes["a"], asked))
        await until(lambda: nodes["a"].entry.num_running == 1)
        with pytest.raises(InvalidRequest, match="running already"):
            await run(nodes["a"], asked)
        nodes["c"].executor.gate.set()
        assert await running == expected(asked)


def test_the_limit_is_what_the_model_is_deployed_with() -> None:
    model = DeployedModel(models.manifest(), kv_tokens=2048, max_context=100)
    check_request(request(60, 40), model, kv_capacity=2048)
    with pytest.raises(InvalidRequest, match="60 prompt tokens and 41 new ones are 101, the limit is 100"):
        check_request(request(60, 41), model, kv_capacity=2048)
    with pytest.raises(InvalidRequest, match="the limit is 50"):
        check_request(request(60, 40), model, kv_capacity=50)
