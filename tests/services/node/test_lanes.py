"""Sessions on one route travel together, and what comes back comes straight from the last hop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet import wire
from meshnet.errors import PositionMismatch
from meshnet.wire import FrameHeaders
from services.node.core.batching import BLOCK_ROWS
from services.node.core.lanes import rows_for_next_frame
from services.node.core.work import PromptWork, Result, SampleWork, Work
from tests.services.node.shells import CountingExecutor, Shell, three_nodes
from tests.services.node.test_generation import expected, request, run, until, until_idle

COUNTS = st.integers(0, 3000)


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 40))
def test_frames_are_as_many_as_stages_and_hold_everybody(ready: int, more: int, in_flight: int, stages: int) -> None:
    sessions = ready + more
    rows = rows_for_next_frame(ready, sessions, in_flight, stages)
    assert 0 <= rows <= min(ready, wire.MAX_ROWS)
    assert (rows == 0) == (ready == 0 or in_flight >= stages)
    if rows < min(ready, wire.MAX_ROWS) and in_flight < stages:
        assert rows * stages >= sessions


def frames_at(shell: Shell) -> list[FrameHeaders]:
    """Filled with the frames that the node gets from now on."""
    seen: list[FrameHeaders] = []
    forward = shell.forwarding.forward

    async def watched(frame: FrameHeaders, body: Any) -> Any:
        seen.append(frame)
        return await forward(frame, body)

    shell.forwarding.forward = watched  # type: ignore[method-assign]
    return seen


async def test_many_sessions_need_as_many_frames_a_round_as_there_are_stages() -> None:
    async with three_nodes() as nodes:
        seen = frames_at(nodes["b"])
        asked = [request(5, 40) for _ in range(12)]
        assert await asyncio.gather(*(run(nodes["a"], one) for one in asked)) == [expected(one) for one in asked]
        decodes = [frame for frame in seen if frame.cached and frame.cached[0] >= 5]
        assert sum(frame.rows for frame in decodes) == 12 * 39
        # Twelve on three stages: four rows in a frame, but for the beginning and the end.
        assert max(frame.rows for frame in decodes) == 4
        assert len(decodes) < 12 * 39 / 3
        await until_idle(nodes)


class TakesTime(CountingExecutor):
    """Steps last, as real ones do, and drawing is part of the round."""

    def run(self, batch: Sequence[Work]) -> list[Result]:
        time.sleep(0.002 if isinstance(batch[0], SampleWork) else 0.005)
        return super().run(batch)


async def test_those_that_come_later_travel_with_those_that_are_there() -> None:
    async with three_nodes(splits={"a": (0, 12)}, new_executor=TakesTime) as nodes:
        executor = nodes["a"].executor
        asked = [request(5, 100) for _ in range(6)]
        running = []
        for one in asked:
            running.append(asyncio.create_task(run(nodes["a"], one)))
            await until(lambda one=one: len(executor.seen.get(one.request_id, [])) > 6)  # type: ignore[misc]
        assert await asyncio.gather(*running) == [expected(one) for one in asked]
        # Steps of all six, and each is a step and a draw.
        assert executor.steps.count(6) > 2 * 40
        await until_idle(nodes)


async def test_chunks_of_a_prompt_travel_beside_those_that_decode() -> None:
    async with three_nodes(splits={"a": (0, 12)}, new_executor=TakesTime) as nodes:
        executor = nodes["a"].executor
        alone: list[list[int]] = []
        beside: list[list[int]] = []
        run_batch = executor.run

        def watched(batch: Sequence[Work]) -> list[Result]:
            lengths = sorted(work.num_tokens for work in batch if isinstance(work, PromptWork))
            if lengths and lengths[-1] == BLOCK_ROWS:
                (beside if lengths[0] == 1 else alone).append(lengths)
            return run_batch(batch)

        asked = [request(5, 150) for _ in range(4)]
        running = [asyncio.create_task(run(nodes["a"], one)) for one in asked]
        await until(lambda: len(executor.cached) == 4 and min(executor.cached.values()) > 8)
        executor.run = watched  # type: ignore[method-assign]
        long = request(15 * BLOCK_ROWS, 2)
        assert await run(nodes["a"], long) == expected(long)
        assert await asyncio.gather(*running) == [expected(one) for one in asked]
        assert len(beside) >= 11 > 4 * len(alone)
        await until_idle(nodes)


async def test_prompts_do_not_wait_for_sessions_that_pause() -> None:
    async with three_nodes() as nodes:
        async with aclosing(nodes["a"].entry.generate(request(5, 500))) as events:
            await anext(events)
            # Nobody reads on: after a while nothing decodes, and no frame leaves that one could wait for.
            long = request(100, 2)
            assert await run(nodes["a"], long) == expected(long)
        await until_idle(nodes)


async def test_what_comes_back_passes_no_hop_between() -> None:
    async with three_nodes() as nodes:
        sent: list[int] = []
        send = nodes["b"].forwarding.peers.send

        async def watched(*arguments: Any) -> Any:
            answer = await send(*arguments)
            sent.append(memoryview(answer).nbytes)
            return answer

        nodes["b"].forwarding.peers.send = watched  # type: ignore[assignment]
        asked = request(300, 20)
        assert await run(nodes["a"], asked) == expected(asked)
        await until(lambda: len(sent) == 3 + 19)
        assert sum(sent) == 0
        await until_idle(nodes)


async def test_what_cannot_be_brought_straight_goes_back_through_the_hops() -> None:
    async with three_nodes() as nodes:
        attempts: list[str] = []

        async def fails(node_id: str, *_: Any) -> bool:
            attempts.append(node_id)
            return False

        nodes["c"].forwarding.peers.deliver = fails  # type: ignore[assignment]
        asked = request(3, 5)
        assert await run(nodes["a"], asked) == expected(asked)
        assert attempts == ["a"] * 5
        await until_idle(nodes)


async def test_returns_without_a_ticket_are_refused() -> None:
    async with three_nodes() as nodes:
        frame = FrameHeaders(1, 1, 8, ("00000000-0000-4000-8000-000000000001",))
        assert not await nodes["c"].forwarding.peers.deliver("a", "0" * 32, frame, bytes(16))
        with nodes["a"].forwarding.returns.expect(1, 1, 8) as ticket:
            wrong = FrameHeaders(1, 2, 8, frame.sessions)
            assert not await nodes["c"].forwarding.peers.deliver("a", ticket.ticket, wrong, bytes(32))
            assert await nodes["c"].forwarding.peers.deliver("a", ticket.ticket, frame, bytes(16))
            assert ticket.outcome.result() == bytes(16)
            assert not await nodes["c"].forwarding.peers.deliver("a", ticket.ticket, frame, bytes(16))


@pytest.mark.parametrize("where", ["a", "b", "c"])
async def test_a_session_that_fails_goes_on_and_takes_none_of_those_beside_it_with_it(where: str) -> None:
    async with three_nodes() as nodes:
        victim, *others = [request(5, 60) for _ in range(6)]
        executor = nodes[where].executor
        once = executor._run

        def fails(work: Work) -> Result:
            segments = getattr(work, "segments", ())
            if segments and segments[0].key.session == victim.request_id and segments[0].position == 30:
                return PositionMismatch("its cache is gone", 0)
            return once(work)

        executor._run = fails  # type: ignore[method-assign]
        answers = await asyncio.gather(*(run(nodes["a"], one) for one in (victim, *others)))
        assert answers == [expected(one) for one in (victim, *others)]
        await until_idle(nodes)


async def test_one_that_is_cancelled_leaves_the_others_in_peace() -> None:
    async with three_nodes() as nodes:
        asked = [request(5, 80) for _ in range(6)]
        running = [asyncio.create_task(run(nodes["a"], one)) for one in asked]
        await until(lambda: max(nodes["b"].executor.cached.values(), default=0) > 20)
        await nodes["a"].entry.abort(asked[0].request_id)
        answers = await asyncio.gather(*running)
        assert answers[0] == expected(asked[0])[: len(answers[0])]
        assert answers[1:] == [expected(one) for one in asked[1:]]
        await until_idle(nodes)
