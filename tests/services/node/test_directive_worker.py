"""Directives as a node obeys them: in order, acknowledged, and refused before anything starts if it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.errors import BadFiles, LoadFailed, NoRoom
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Topology
from services.node.config import NodeConfig
from services.node.core.compression import Compression
from services.node.core.sessions import Piece, SessionTable
from services.node.core.shards import ShardTable
from services.node.core.work import LoadedShard, Progress, SessionKey, ShardSpec
from services.node.core.workspace import predict_workspace_bytes
from services.node.directive_worker import DirectiveWorker
from services.node.forwarding import Forwarding
from services.node.peers import Peers
from services.node.runner import Runner
from services.node.stub import StubExecutor, StubShard
from tests import models

KV_TOKENS = 256
# Of the test model: 1000 bytes of weights a layer, 4 bytes of KV cache a token, 4000 bytes for the entry.
LAYER_BYTES = 1000 + 4 * KV_TOKENS
S, F = DirectiveState, FailureKind


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
async def bench(
    vram_bytes: int = 6 * LAYER_BYTES, drain_timeout: float = 5.0, executor: StubExecutor | None = None
) -> AsyncIterator[Bench]:
    config = NodeConfig(
        *("n", "", "", "", "", vram_bytes, Quantization.BFLOAT16),
        fallbacks=(Quantization.INT8,),
        drain_timeout=drain_timeout,
    )
    peers = Peers(Topology, Compression.OFF, 1.0)
    forwarding = Forwarding(ShardTable(), SessionTable(), Runner(executor or StubExecutor()), peers, 1.0)
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
    ("directive", "reason", "kind"),
    [
        (load("x", 0, 2, model_id="other"), "no files of model 'other'", F.BAD_FILES),
        (load("x", 0, 2, revision="r2"), "another revision", F.BAD_FILES),
        (load("x", 10, 13), "has 12 layers", F.OTHER),
        (load("x", 5, 9), "held here already", F.OTHER),
        (load("x", 8, 12), "that this node lends", F.NO_ROOM),
        (load("x", 0, 2), "that this node lends", F.NO_ROOM),
        (load("x", 8, 9, quantization=Quantization.NF4), "at bfloat16, int8, not at nf4", F.OTHER),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_reason_and_nothing_is_lost(
    directive: Directive, reason: str, kind: FailureKind
) -> None:
    async with bench() as b:
        await b.worker.accept(load("1", 4, 8))
        await b.finished("1")
        await b.worker.accept(directive)
        finished = await b.finished("x")
        assert (finished.state, finished.failure_kind) == (S.FAILED, kind)
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


async def test_a_directive_of_an_older_plan_is_refused_before_anything_starts() -> None:
    async with bench() as b:
        await b.worker.accept(load("1", 4, 8, plan_version=7))
        await b.worker.accept(load("2", 8, 9, plan_version=6))
        await b.worker.accept(drop("3", 4, 8))
        await b.worker.accept(load("4", 9, 10, plan_version=7))
        assert (await b.finished("4")).state is S.READY
        for directive_id in ("2", "3"):
            assert b.states(directive_id) == [S.FAILED]
            refused = await b.finished(directive_id)
            assert refused.failure_kind is F.STALE_PLAN
            assert "has obeyed plan 7 already" in refused.failure
        assert b.forwarding.shards.layers("m") == {4, 5, 6, 7, 9}
        # Known is known, however old its plan is by now.
        await b.worker.accept(load("5", 10, 11, plan_version=8))
        await b.finished("5")
        await b.worker.accept(load("1", 4, 8, plan_version=7))
        assert b.states("1")[-1] is S.READY


@dataclass
class FailingExecutor(StubExecutor):
    """Fails to load, or to run the largest step of what it has loaded."""

    on_load: Exception | None = None
    on_trial: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def load(self, spec: ShardSpec, progress: Progress) -> StubShard:
        if self.on_load:
            raise self.on_load
        return super().load(spec, progress)

    def trial(self, shard: LoadedShard) -> None:
        if self.on_trial:
            raise self.on_trial


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoRoom("out of memory"), F.NO_ROOM),
        (MemoryError(), F.NO_ROOM),
        (BadFiles("cut short"), F.BAD_FILES),
        (LoadFailed("not supported"), F.OTHER),
        (RuntimeError("a defect"), F.OTHER),
    ],
)
@pytest.mark.parametrize("place", ["on_load", "on_trial"])
async def test_what_a_load_failed_of_is_told_and_nothing_is_kept(
    place: str, error: Exception, kind: FailureKind
) -> None:
    executor = FailingExecutor(**{place: error})
    async with bench(executor=executor) as b:
        await b.worker.accept(load("1", 4, 8))
        assert (await b.finished("1")).failure_kind is kind
        assert b.forwarding.shards.listing() == ()
        executor.on_load = executor.on_trial = None
        await b.worker.accept(load("2", 4, 8))
        assert (await b.finished("2")).state is S.READY


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


class SlowExecutor(StubExecutor):
    """Loads when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()

    def load(self, spec: ShardSpec, progress: Progress) -> StubShard:
        assert self.let.wait(5)
        return super().load(spec, progress)


async def test_what_has_not_begun_when_the_tracker_is_lost_is_forgotten_until_it_comes_again() -> None:
    executor = SlowExecutor()
    async with bench(executor=executor) as b:
        await b.worker.accept(load("1", 4, 6))
        async with asyncio.timeout(5):
            while S.LOADING not in b.states("1"):
                await asyncio.sleep(0.005)
        await b.worker.accept(load("2", 6, 7, plan_version=2))
        await b.worker.accept(load("3", 7, 8, plan_version=3))
        b.worker.forget_waiting()
        executor.let.set()
        assert (await b.finished("1")).state is S.READY
        # One of a plan that another has followed is not too old when it comes again.
        await b.worker.accept(load("2", 6, 7, plan_version=2))
        assert (await b.finished("2")).state is S.READY
        assert b.states("3") == [S.ACCEPTED]
        assert b.forwarding.shards.layers("m") == {4, 5, 6}


async def test_a_drop_that_waits_for_sessions_when_the_tracker_is_lost_is_forgotten() -> None:
    async with bench() as b:
        await b.worker.accept(load("1", 4, 8))
        await b.finished("1")
        key = SessionKey("s", "m", LayerRange(4, 8))
        b.forwarding.sessions.accept([Piece(key, 0, 5)], first_chunk=True, now=0)
        await b.worker.accept(drop("2", 4, 8))
        for _ in range(20):
            await asyncio.sleep(0)
        b.worker.forget_waiting()
        b.forwarding.close([key])
        await b.worker.accept(load("3", 8, 9))
        assert (await b.finished("3")).state is S.READY
        assert b.states("2") == [S.ACCEPTED]
        assert b.forwarding.shards.layers("m") == {4, 5, 6, 7, 8}
        await b.worker.accept(drop("2", 4, 8))
        assert (await b.finished("2")).state is S.DROPPED


class ShortDevice(StubExecutor):
    """Its device has as little memory free as it is told."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self.free_bytes = free_bytes

    def memory_free_bytes(self) -> int:  # type: ignore[override]  # a stub has none
        return self.free_bytes


@pytest.mark.parametrize(("missing", "state"), [(0, S.READY), (1, S.FAILED)])
async def test_a_load_needs_what_is_really_free_for_weights_kv_cache_and_workspace(
    missing: int, state: DirectiveState
) -> None:
    workspace = predict_workspace_bytes(
        models.manifest(), Quantization.BFLOAT16, KV_TOKENS, entry=False, layers=LayerRange(4, 6)
    )
    executor = ShortDevice(2 * LAYER_BYTES + workspace - missing)
    async with bench(vram_bytes=1 << 30, executor=executor) as b:
        await b.worker.accept(load("1", 4, 6))
        finished = await b.finished("1")
        assert finished.state is state
        if state is S.FAILED:
            assert finished.failure_kind is F.NO_ROOM
            assert "of the device's memory are free" in (finished.failure or "")
