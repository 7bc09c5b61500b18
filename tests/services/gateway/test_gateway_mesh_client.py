"""How long a request waits for a route to become ready. The topologies are set; nothing is connected."""

from __future__ import annotations

import asyncio

import pytest

from meshnet import convert
from meshnet.errors import MissingLayers, RouteNotReady, UnknownModel
from meshnet.topology import Node, Topology
from services.gateway.api_errors import ApiError
from services.gateway.mesh_client import MeshClient
from tests.garbled import NO_MESSAGE, GarbledService, served
from tests.services.gateway.fake_mesh import shard
from tests.services.gateway.test_gateway_choices import node, topology


@pytest.fixture
def client() -> MeshClient:
    return MeshClient("127.0.0.1:1", 60)


async def test_it_waits_over_several_topologies_until_a_route_is_ready(client: MeshClient) -> None:
    client.set_topology(topology(node("a", shard("m"), failure=None)))
    waiting = asyncio.create_task(client.entry_node("m", turn=0))
    await asyncio.sleep(0)
    client.set_topology(topology(node("a", shard("m"), failure="mute")))
    await asyncio.sleep(0)
    assert not waiting.done()
    client.set_topology(topology(node("a", shard("m"))))
    async with asyncio.timeout(5):
        picked = await waiting
    assert isinstance(picked, Node)
    assert picked.node_id == "a"


async def test_it_gives_up_with_the_newest_failure(client: MeshClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.mesh_client.READY_SECONDS", 0.05)
    client.set_topology(topology(node("a", shard("m"), failure="mute")))
    with pytest.raises(RouteNotReady, match="mute"):
        await client.entry_node("m", turn=0)


async def test_what_waiting_does_not_help_is_told_at_once(client: MeshClient) -> None:
    with pytest.raises(ApiError):
        await client.entry_node("m", turn=0)
    client.set_topology(topology(node("a", shard("m", 0, 10))))
    with pytest.raises(MissingLayers):
        await client.entry_node("m", turn=0)
    with pytest.raises(UnknownModel):
        await client.entry_node("other", turn=0)


async def test_a_topology_that_was_changed_on_its_way_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.mesh_client.RECONNECT_SECONDS", 0.05)
    good = convert.update_to_proto(topology(node("a", shard("m"))).update_since(None)).SerializeToString()
    service = GarbledService("meshnet.v1.Tracker", {}, {"WatchTopology": [NO_MESSAGE, good]})
    async with served(service) as address:
        client = MeshClient(address, 60)
        followed = asyncio.Event()
        taken = client.set_topology

        def take(found: Topology) -> None:
            taken(found)
            followed.set()

        monkeypatch.setattr(client, "set_topology", take)
        watching = asyncio.create_task(client.watch_topology())
        async with asyncio.timeout(20):
            await followed.wait()
        assert client.topology
        assert list(client.topology.nodes) == ["a"]
        assert len(set(service.peers)) == 2, "over a new connection"
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
