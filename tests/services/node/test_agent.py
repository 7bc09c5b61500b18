"""The link to the tracker: it survives what the tracker does, and always ends when asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.errors import InvalidRequest, MeshnetError, Unregistered
from meshnet.model import LayerRange
from meshnet.topology import Node, Topology
from services.node.agent import Agent
from services.node.tracker_client import Lease, TrackerUnreachable
from tests import models


@dataclass
class ScriptedTracker:
    """Accepts every registration; `fail` ends what is under way with `error`."""

    error: MeshnetError
    address: str = "scripted"
    registrations: int = 0
    connections: int = 1
    newest_plan_versions: list[int] = field(default_factory=list)
    fail: asyncio.Event = field(default_factory=asyncio.Event)

    async def register(self, node: Node, manifests: object, newest_plan_version: int) -> Lease:
        self.registrations += 1
        self.newest_plan_versions.append(newest_plan_version)
        self.fail.clear()
        return Lease(10.0, 60.0, {"m": "another revision"})

    async def reconnect(self) -> None:
        self.connections += 1

    async def heartbeat(self, node: Node) -> None:
        await self.fail.wait()
        raise self.error

    async def report(self, directive: Directive, shards: object, newest_plan_version: int) -> None:
        self.newest_plan_versions.append(newest_plan_version)

    async def directives(self) -> AsyncIterator[Directive]:
        await asyncio.Event().wait()
        raise AssertionError("waits for ever")
        yield

    async def topologies(self) -> AsyncIterator[Topology]:
        yield models.topology(models.node("a", (0, 12)))
        await asyncio.Event().wait()


async def ignore(directive: Directive) -> None:
    raise AssertionError("no directive is sent")


def agent(tracker: ScriptedTracker) -> Agent:
    return Agent(tracker, lambda: models.node("a"), [])  # type: ignore[arg-type]


async def ended(running: asyncio.Task[None]) -> None:
    """Cancels it, and requires that it ends of that."""
    running.cancel()
    await asyncio.wait([running], timeout=2)
    assert running.cancelled()


@pytest.mark.parametrize("turns", range(8))
async def test_it_ends_when_cancelled_in_the_moment_in_which_the_tracker_is_lost(turns: int) -> None:
    tracker = ScriptedTracker(TrackerUnreachable("gone"))
    linked = agent(tracker)
    running = asyncio.create_task(linked.run(ignore))
    async with asyncio.timeout(5):
        await linked.registered.wait()
    await asyncio.sleep(0)
    tracker.fail.set()
    # The failure travels from task to task a step at a time; the cancellation meets it at each.
    for _ in range(turns):
        await asyncio.sleep(0)
    await ended(running)


@pytest.mark.parametrize("error", [TrackerUnreachable("gone"), Unregistered("who?"), InvalidRequest("no sense")])
async def test_it_registers_again_and_keeps_the_last_topology(
    error: MeshnetError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.node.agent.RETRY_SECONDS", 0.01)
    tracker = ScriptedTracker(error)
    linked = agent(tracker)
    parted: list[int] = []
    running = asyncio.create_task(linked.run(ignore, on_parted=lambda: parted.append(tracker.registrations)))
    async with asyncio.timeout(5):
        await linked.registered.wait()
        while not linked.topology.nodes:
            await asyncio.sleep(0)
        tracker.fail.set()
        while tracker.registrations < 2:
            await asyncio.sleep(0.005)
        assert set(linked.topology.nodes) == {"a"}
    # Before the tracker hears of this node again.
    assert parted == [1]
    await ended(running)


async def test_the_tracker_is_told_of_the_newest_plan_that_was_obeyed() -> None:
    tracker = ScriptedTracker(TrackerUnreachable("gone"))
    linked = agent(tracker)
    order = Directive("d", "a", DirectiveKind.LOAD_SHARD, "m", LayerRange(0, 1), 7, "test")
    accepted = order.advance(DirectiveState.ACCEPTED)
    await linked.report(accepted)
    stale = replace(order, plan_version=9).advance(DirectiveState.FAILED, failure_kind=FailureKind.STALE_PLAN)
    await linked.report(stale)
    running = asyncio.create_task(linked.run(ignore))
    async with asyncio.timeout(5):
        await linked.registered.wait()
    assert tracker.newest_plan_versions == [7, 7, 7]
    await ended(running)


async def test_a_refused_model_is_said(caplog: pytest.LogCaptureFixture) -> None:
    linked = agent(ScriptedTracker(TrackerUnreachable("gone")))
    running = asyncio.create_task(linked.run(ignore))
    async with asyncio.timeout(5):
        await linked.registered.wait()
    assert "the mesh refuses a model: another revision" in caplog.text
    await ended(running)
