"""What a node makes of answers that were changed between the tracker and it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from meshnet import convert
from meshnet.directive import Directive
from meshnet.v1 import tracker_pb2
from services.node.agent import Agent
from services.node.tracker_client import TrackerClient, TrackerUnreachable
from tests import models
from tests.garbled import NO_MESSAGE, GarbledService, served

REGISTERED = tracker_pb2.RegisterResponse(lease_seconds=10, heartbeat_seconds=5).SerializeToString()
TOPOLOGY = convert.update_to_proto(models.topology(models.node("a", (0, 12))).update_since(None)).SerializeToString()


async def first(stream: Any) -> Any:
    return await anext(stream)


CALLS: dict[str, Callable[[TrackerClient], Awaitable[Any]]] = {
    "Register": lambda client: client.register(models.node("a"), [], 0),
    "WatchDirectives": lambda client: first(client.directives()),
    "WatchTopology": lambda client: first(client.topologies()),
}


@pytest.mark.parametrize("method", CALLS)
async def test_what_is_no_message_is_a_tracker_out_of_reach(method: str) -> None:
    answers = {method: [NO_MESSAGE]}
    service = GarbledService(
        "meshnet.v1.Tracker", answers if method == "Register" else {}, {} if method == "Register" else answers
    )
    async with served(service) as address:
        client = TrackerClient(address, "a", "incarnation")
        with pytest.raises(TrackerUnreachable, match="makes no sense"):
            await CALLS[method](client)
        await client.close()


async def test_a_node_outlives_a_changed_topology_and_connects_anew() -> None:
    service = GarbledService(
        "meshnet.v1.Tracker",
        {"Register": [REGISTERED], "Heartbeat": [b""]},
        {"WatchDirectives": [NO_MESSAGE, b""], "WatchTopology": [NO_MESSAGE, TOPOLOGY]},
    )

    async def take(_: Directive) -> None:
        """Nothing is done with it."""

    async with served(service) as address:
        client = TrackerClient(address, "a", "incarnation")
        agent = Agent(client, lambda: models.node("a"), [])
        followed = asyncio.Event()
        running = asyncio.create_task(agent.run(take, followed.set))
        async with asyncio.timeout(20):
            await followed.wait()
        assert list(agent.topology.nodes) == ["a"]
        assert len(set(service.peers)) > 1, "over a new connection"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.close()
