"""Directives as a node obeys them: in order, acknowledged, and refused before anything starts if it cannot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from meshnet.directive import Directive, DirectiveKind, DirectiveState
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Topology
from services.node.config import NodeConfig
from services.node.core.sessions import Piece, SessionTable
from services.node.core.shards import ShardTable
from services.node.core.work import SessionKey
from services.node.directive_worker import DirectiveWorker
from services.node.forwarding import Forwarding
from services.node.peers import Peers
from services.node.runner import Runner
from services.node.stub import StubExecutor
from tests import models

KV_TOKENS = 256
# Of the test model: 1000 bytes of weights a layer, 4 bytes of KV cache a token, 4000 bytes for the entry.
LAYER_BYTES = 1000 + 4 * KV_TOKENS
S = DirectiveState


@dataclass
class Bench:
    """A worker and what it has reported."""

    worker: DirectiveWorker
    forwarding: Forwarding
    reports: list[Directive] = field(default_factory=list)

    def states(self, directive_id: str) -> list[DirectiveState]:
        return [report.state for report in self.reports if report.directive_id == directive_id]

    async def finished(self, directive_id: str) -> Directive:
        async with asyncio.timeout(5):
            while not any(state.is_final for state in self.states(directive_id)):
                await asyncio.sleep(0.005)
        return next(r for r in self.reports if r.directive_id == directive_id and r.state.is_final)


@contextlib.asynccontextmanager
async def bench(vram_bytes: int = 6 * LAYER_BYTES, drain_timeout: float = 5.0) -> AsyncIterator[Bench]:
    config = NodeConfig("n", "", "", "", "", vram_bytes, Quantization.BFLOAT16, drain_timeout=drain_timeout)
    peers = Peers(Topology, None, 1.0)
    forwarding = Forwarding(ShardTable(), SessionTable(), Runner(StubExecutor()), peers, 1.0)
    reports: list[Directive] = []

    async def report(directive: Directive) -> None:
        reports.append(directive)

    worker = DirectiveWorker(config, {"m": models.manifest()}, forwarding, report, asyncio.Lock())
    running = asyncio.create_task(worker.run())
    yield Bench(worker, forwarding, reports)
    running.cancel()
    await peers.close()
    forwarding.runner.stop()
    forwarding.sessions.check_integrity()


def load(directive_id: str, start: int, end: int, **more: object) -> Directive:
    directive = Directive(
        directive_id, "n", DirectiveKind.LOAD_SHARD, "m", LayerRange(start, end), 1, "test", kv_tokens=KV_TOKENS
    )
    return replace(directive, **more)  # type: ignore[arg-type]


def drop(directive_id: str, start: int, end: int) -> Directive:
    return Directive(directive_id, "n", DirectiveKind.DROP_SHARD, "m", LayerRange(start, end), 1, "test")


async def test_a_load_is_acknowledged_step_by_step_and_then_served() -> None:
    async with bench() as b:
        await b.worker.accept(load("1", 4, 8))
        finished = await b.finished("1")
        assert (finished.state, finished.failure) == (S.READY, "")
        assert b.states("1")[0] is S.ACCEPTED
        assert set(b.states("1")[1:-1]) <= {S.LOADING}
        assert b.forwarding.shards.layers("m") == frozenset(range(4, 8))
        assert b.forwarding.sessions.free_tokens() == KV_TOKENS


@pytest.mark.parametrize(
    ("directive", "reason"),
    [
        (load("x", 0, 2, model_id="other"), "no files of model 'other'"),
        (load("x", 0, 2, revision="r2"), "another revision"),
        (load("x", 10, 13), "has 12 layers"),
        (load("x", 5, 9), "held here already"),
        (load("x", 8, 12), "this node lends are free"),
        (load("x", 0, 2), "this node lends are free"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason_and_nothing_is_lost(
    directive: Directive, reason: str
) -> None:
    async with bench() as b:
        await b.worker.accept(load("1", 4, 8))
        await b.finished("1")
        await b.worker.accept(directive)
        finished = await b.finished("x")
        assert finished.state is S.FAILED
        assert reason in finished.failure
        assert b.forwarding.shards.layers("m") == frozenset(range(4, 8))
        await b.worker.accept(load("2", 8, 9))
        assert (await b.finished("2")).state is S.READY


async def test_a_directive_that_comes_again_is_only_reported_again() -> None:
    async with bench() as b:
        await b.worker.accept(load("1", 4, 8))
        await b.finished("1")
        await b.worker.accept(load("1", 4, 8, state=S.LOADING))
        assert b.states("1")[-2:] == [S.READY, S.READY]


async def test_a_drop_waits_for_the_sessions_and_makes_room_for_what_follows() -> None:
    async with bench() as b:
        await b.worker.accept(load("1", 2, 8))
        await b.finished("1")
        key = SessionKey("s", "m", LayerRange(4, 8))
        b.forwarding.sessions.accept([Piece(key, 0, 5)], first_chunk=True, now=0)
        await b.worker.accept(drop("2", 4, 8))
        await b.worker.accept(load("3", 8, 12))
        await b.worker.accept(drop("4", 2, 3))
        for _ in range(20):
            await asyncio.sleep(0)
        assert b.states("2") == [S.ACCEPTED]
        b.forwarding.close([key])
        assert (await b.finished("2")).state is S.DROPPED
        assert (await b.finished("3")).state is S.READY
        assert (await b.finished("4")).state is S.DROPPED
        assert b.forwarding.shards.layers("m") == {3, 8, 9, 10, 11}


async def test_a_session_that_never_ends_holds_a_drop_up_for_a_while_only() -> None:
    async with bench(drain_timeout=0.05) as b:
        await b.worker.accept(load("1", 4, 8))
        await b.finished("1")
        b.forwarding.sessions.accept([Piece(SessionKey("s", "m", LayerRange(4, 8)), 0, 5)], first_chunk=True, now=0)
        await b.worker.accept(drop("2", 4, 8))
        assert (await b.finished("2")).state is S.DROPPED
        assert len(b.forwarding.sessions) == 0
