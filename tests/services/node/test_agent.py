"""The link to the tracker: it survives what the tracker does, and always ends when asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from meshnet.directive import Directive
from meshnet.errors import InvalidRequest, MeshnetError, Unregistered
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
    fail: asyncio.Event = field(default_factory=asyncio.Event)

    async def register(self, node: Node, manifests: object) -> Lease:
        self.registrations += 1
        self.fail.clear()
        return Lease(10.0, 60.0)

    async def heartbeat(self, node: Node) -> None:
        await self.fail.wait()
        raise self.error

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
    running = asyncio.create_task(linked.run(ignore))
    async with asyncio.timeout(5):
        await linked.registered.wait()
        while not linked.topology.nodes:
            await asyncio.sleep(0)
        tracker.fail.set()
        while tracker.registrations < 2:
            await asyncio.sleep(0.005)
        assert set(linked.topology.nodes) == {"a"}
    await ended(running)
