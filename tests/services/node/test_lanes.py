"""Sessions on one route travel together, and what comes back comes straight from the last hop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet import wire
from meshnet.errors import PositionMismatch
from meshnet.wire import FrameHeaders
from services.node.core.lanes import rows_for_next_frame
from services.node.core.work import Result, Work
from tests.services.node.shells import Shell, three_nodes
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
async def test_a_session_that_fails_takes_none_of_those_beside_it_with_it(where: str) -> None:
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
        answers: Sequence[Any] = await asyncio.gather(
            *(run(nodes["a"], one) for one in (victim, *others)), return_exceptions=True
        )
        assert isinstance(answers[0], PositionMismatch)
        assert list(answers[1:]) == [expected(one) for one in others]
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
