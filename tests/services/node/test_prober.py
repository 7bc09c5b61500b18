"""Probes over three nodes on real sockets: a route is ready when a token has come through all its hops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from meshnet.errors import MissingLayers
from tests.services.node.shells import Shell, three_nodes
from tests.services.node.test_generation import expected, request, run, until, until_idle


@contextlib.asynccontextmanager
async def probing(shell: Shell) -> AsyncIterator[None]:
    running = asyncio.create_task(shell.prober.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=10)
        assert running.cancelled()


def failure_of(shell: Shell) -> str:
    return "".join(outcome.failure for outcome in shell.prober.outcomes())


def is_ready(shell: Shell) -> bool:
    return any(outcome.ready for outcome in shell.prober.outcomes())


async def test_a_token_through_all_hops_proves_a_route_and_leaves_nothing_behind() -> None:
    async with three_nodes() as nodes, probing(nodes["a"]):
        await until(lambda: is_ready(nodes["a"]))
        (outcome,) = nodes["a"].prober.outcomes()
        assert [hop.node_id for hop in outcome.hops] == ["a", "b", "c"]
        assert outcome.latency_seconds is not None
        assert all(shell.executor.steps for shell in nodes.values())
        await until_idle(nodes)


async def test_a_route_with_a_mute_last_hop_is_not_ready_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.node.core.probing.FIRST_RETRY_SECONDS", 0.01)
    async with three_nodes(probe_timeout=0.3) as nodes:
        nodes["c"].executor.gate.clear()
        async with probing(nodes["a"]):
            await until(lambda: bool(failure_of(nodes["a"])))
            assert "a:0-4 b:4-8 c:8-12" in failure_of(nodes["a"])
            assert not is_ready(nodes["a"])
            nodes["c"].executor.gate.set()
            await until(lambda: is_ready(nodes["a"]))
        await until_idle(nodes)


async def test_a_hop_that_answers_errors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.node.core.probing.FIRST_RETRY_SECONDS", 0.01)
    async with three_nodes() as nodes:
        nodes["b"].executor.fail = ValueError("broken")
        async with probing(nodes["a"]):
            await until(lambda: "node b" in failure_of(nodes["a"]))
            nodes["b"].executor.fail = None
            await until(lambda: is_ready(nodes["a"]))
        await until_idle(nodes)


async def test_a_generation_that_a_hop_fails_under_takes_the_proof_back() -> None:
    async with three_nodes(hop_timeout=0.3, probe_timeout=30.0) as nodes, probing(nodes["a"]):
        await until(lambda: is_ready(nodes["a"]))
        nodes["c"].executor.gate.clear()
        with pytest.raises(MissingLayers, match="node c"):
            await run(nodes["a"], request())
        assert "node c" in failure_of(nodes["a"])
        nodes["c"].executor.gate.set()
        await until(lambda: is_ready(nodes["a"]))
        asked = request()
        assert await run(nodes["a"], asked) == expected(asked)
        await until_idle(nodes)


async def test_a_full_kv_cache_says_nothing_about_the_route(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("services.node.core.probing.FIRST_RETRY_SECONDS", 0.01)
    async with three_nodes(kv_tokens=256) as nodes:
        nodes["c"].executor.gate.clear()
        holder = asyncio.create_task(run(nodes["a"], request(100, 100)))
        await until(lambda: len(nodes["a"].sessions) == 1)
        async with probing(nodes["a"]):
            await until(lambda: "no room" in caplog.text)
            assert nodes["a"].prober.outcomes() == ()
            nodes["c"].executor.gate.set()
            await holder
            await until(lambda: is_ready(nodes["a"]))
        await until_idle(nodes)


async def test_every_replica_is_proven_and_generations_are_spread_over_them() -> None:
    splits = {"a": (0, 4), "b1": (4, 12), "b2": (4, 12), "b3": (4, 12)}
    async with three_nodes(splits=splits) as nodes, probing(nodes["a"]):
        replicas = [shell for node_id, shell in nodes.items() if node_id != "a"]
        await until(lambda: all(shell.executor.steps for shell in replicas))
        await until_idle(nodes)
        await until(lambda: is_ready(nodes["a"]))
        # Nothing of what they have to do is in the topology: the node knows what it has begun itself.
        for shell in replicas:
            shell.executor.gate.clear()
        asked = [request() for _ in range(12)]
        running = [asyncio.create_task(run(nodes["a"], one)) for one in asked]
        await until(lambda: sum(len(shell.sessions) for shell in replicas) == 12)
        # Not exactly a third each: what a token took is part of what a route costs.
        assert all(len(shell.sessions) >= 2 for shell in replicas)
        for shell in replicas:
            shell.executor.gate.set()
        assert await asyncio.gather(*running) == [expected(one) for one in asked]
        await until_idle(nodes)


async def test_a_node_without_layer_0_has_no_route() -> None:
    async with three_nodes() as nodes:
        with pytest.raises(MissingLayers):
            nodes["b"].prober.route("m")
