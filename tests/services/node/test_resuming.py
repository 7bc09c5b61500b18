"""Generations whose hops fail go on over other routes, and say the same as if nothing had happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from meshnet.errors import BrokenLayers, BrokenNode, KvFull, NextHopFailed, PositionMismatch
from services.node.core.broken import GIVE_UP_SESSIONS
from services.node.core.members import LostNode
from services.node.core.speculation import FixedLimit, NewLimit, no_drafts
from services.node.core.work import ForwardWork, Result, Work
from tests.services.node.shells import Shell, three_nodes
from tests.services.node.test_generation import expected, request, run, until, until_idle

# Layers 4 to 12 are held twice: by b and c, and by d.
SPLITS = {"a": (0, 4), "b": (4, 8), "c": (8, 12), "d": (4, 12)}


def fails_at(shell: Shell, position: int, error: Callable[[], Result]) -> list[int]:
    """Each work that is not behind so many tokens fails. Returns the positions of those that have."""
    once, failed = shell.executor._run, []

    def run_or_fail(work: Work) -> Result:
        if isinstance(work, ForwardWork) and work.segments[0].position + work.segments[0].num_tokens > position:
            failed.append(work.segments[0].position)
            return error()
        return once(work)

    shell.executor._run = run_or_fail  # type: ignore[method-assign]
    return failed


async def stop(shell: Shell) -> None:
    """As if its process were gone: nothing answers any more."""
    await shell.server.stop()
    shell.executor.gate.set()


async def lose(nodes: dict[str, Shell], node_id: str) -> None:
    """While a frame is there. The node itself goes on, as one may that others have not heard of for long."""
    executor = nodes[node_id].executor
    await until(lambda: max(executor.cached.values(), default=0) > 20)

    def has_failed() -> bool:
        nodes["a"].forwarding.node_lost(LostNode(node_id, "was lost"))
        return not len(nodes["a"].sessions)

    executor.gate.clear()
    await until(has_failed)
    executor.gate.set()


def on_the_way(nodes: dict[str, Shell]) -> list[str]:
    """Nodes behind a that have sessions."""
    return [node_id for node_id, node in nodes.items() if node_id != "a" and len(node.sessions)]


@pytest.mark.parametrize("new_limit", [no_drafts, lambda: FixedLimit(3)])
@pytest.mark.parametrize("num_sessions", [1, 8])
async def test_a_hop_is_lost_in_the_midst_of_decoding(new_limit: NewLimit, num_sessions: int) -> None:
    async with three_nodes(splits=SPLITS, kv_tokens=8192, new_limit=new_limit) as nodes:
        asked = [request(5, 200) for _ in range(num_sessions)]
        running = [asyncio.create_task(run(nodes["a"], one)) for one in asked]
        await until(lambda: any(max(nodes[i].executor.cached.values(), default=0) > 50 for i in "bcd"))
        for lost in on_the_way(nodes)[:1]:
            await stop(nodes[lost])
            nodes["a"].forwarding.node_lost(LostNode(lost, "was lost"))
        assert await asyncio.gather(*running) == [expected(one) for one in asked]
        await until(lambda: not len(nodes["a"].sessions))


async def test_a_hop_is_lost_in_the_midst_of_a_prompt() -> None:
    async with three_nodes(splits=SPLITS, kv_tokens=8192) as nodes:
        one = request(1500, 5)
        for node_id in "bcd":
            nodes[node_id].executor.gate.clear()
        running = asyncio.create_task(run(nodes["a"], one))
        await until(lambda: bool(on_the_way(nodes)))
        (lost,) = on_the_way(nodes)
        for node_id in {"b", "c", "d"} - {lost}:
            nodes[node_id].executor.gate.set()
        nodes["a"].forwarding.node_lost(LostNode(lost, "was lost"))
        assert await running == expected(one)
        nodes[lost].executor.gate.set()
        await until_idle(nodes)


async def test_a_second_hop_is_lost_while_the_first_is_made_up_for() -> None:
    async with three_nodes(splits={**SPLITS, "e": (4, 12)}, kv_tokens=8192) as nodes:
        one = request(5, 100)
        running = asyncio.create_task(run(nodes["a"], one))
        gone: set[str] = set()
        for _ in range(2):
            await until(lambda: any(max(nodes[i].executor.cached.values(), default=0) > 20 for i in set("bcde") - gone))
            (lost, *_) = (node_id for node_id in on_the_way(nodes) if node_id not in gone)
            gone.add(lost)
            await stop(nodes[lost])
            nodes["a"].forwarding.node_lost(LostNode(lost, "was lost"))
        assert await running == expected(one)


async def test_what_a_hop_has_lost_is_computed_anew() -> None:
    async with three_nodes() as nodes:
        one = request(5, 60)
        once: Any = nodes["c"].executor._run
        lost: list[int] = []

        def loses(work: Work) -> Result:
            if isinstance(work, ForwardWork) and work.segments[0].position == 30 and not lost:
                lost.append(30)
                return PositionMismatch("its cache is gone", 0)
            result: Result = once(work)
            return result

        nodes["c"].executor._run = loses  # type: ignore[method-assign]
        assert await run(nodes["a"], one) == expected(one)
        assert lost == [30]
        await until_idle(nodes)


async def test_a_hop_that_is_always_wrong_is_named_in_the_end() -> None:
    async with three_nodes() as nodes:
        failed = fails_at(nodes["c"], 30, lambda: PositionMismatch("its cache is gone", 0))
        with pytest.raises(PositionMismatch, match="its cache is gone"):
            await run(nodes["a"], request(5, 60))
        assert len(failed) == 2
        await until_idle(nodes)


async def test_a_hop_that_computes_nonsense_is_avoided_and_gives_its_layers_up() -> None:
    async with three_nodes(splits=SPLITS, kv_tokens=8192) as nodes:
        failed = fails_at(nodes["d"], 0, lambda: BrokenLayers("not finite"))
        for _ in range(50):
            one = request(5, 20)
            assert await run(nodes["a"], one) == expected(one)
            if len(failed) == GIVE_UP_SESSIONS:
                break
        await until_idle(nodes)
        assert (nodes["b"].given_up, nodes["d"].given_up) == ([], ["m"])


async def test_an_entry_node_that_computes_nonsense_says_so() -> None:
    async with three_nodes() as nodes:
        nodes["a"].executor.fail = BrokenLayers("not finite")
        with pytest.raises(BrokenNode, match="node a: not finite"):
            await run(nodes["a"], request(5, 60))


async def test_a_hop_that_has_no_room_for_a_new_prompt_says_so_at_once() -> None:
    async with three_nodes() as nodes:
        failed = fails_at(nodes["b"], 0, lambda: KvFull("no room", 0.01))
        with pytest.raises(KvFull, match="no room"):
            await run(nodes["a"], request(5, 60))
        assert failed == [0]
        await until_idle(nodes)


async def test_layers_that_come_back_in_time_are_waited_for() -> None:
    async with three_nodes() as nodes:
        one = request(5, 100)
        running = asyncio.create_task(run(nodes["a"], one))
        await lose(nodes, "c")
        # Nothing else holds its layers: the generation waits until a token has come through it again.
        prober = asyncio.create_task(nodes["a"].prober.run())
        try:
            assert await running == expected(one)
        finally:
            prober.cancel()
            await asyncio.gather(prober, return_exceptions=True)
        await until_idle(nodes)


async def test_layers_that_do_not_come_back_end_a_generation_with_the_node_that_was_lost() -> None:
    async with three_nodes(resume_timeout=0.2) as nodes:
        running = asyncio.create_task(run(nodes["a"], request(5, 1000)))
        await lose(nodes, "c")
        with pytest.raises(NextHopFailed, match="node c was lost"):
            await running
        await until_idle(nodes)


async def test_who_leaves_while_a_route_is_waited_for_leaves_nothing_behind() -> None:
    async with three_nodes() as nodes:
        one = request(5, 1000)
        running = asyncio.create_task(run(nodes["a"], one))
        await lose(nodes, "c")
        await nodes["a"].entry.abort(one.request_id)
        told = await running
        assert told == expected(one)[: len(told)]
        await until_idle(nodes)
