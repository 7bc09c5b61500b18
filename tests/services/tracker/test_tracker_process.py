"""The tracker as a process of its own, spoken to as nodes, gateways and people do."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshnet import convert, rpc
from meshnet.directive import DirectiveState
from meshnet.topology import Topology
from meshnet.v1 import admin_pb2, admin_pb2_grpc, tracker_pb2, tracker_pb2_grpc
from tests.processes import ROOT, RunningProcess, start
from tests.services.tracker.fake_node import FakeNode
from tests.services.tracker.meshes import MB, manifest, node

READY = re.compile(r"^meshnet tracker listening on (127\.0\.0\.1:\d+)$", re.MULTILINE)
DEADLINE = 20.0
ROOM = 12 * MB + 100_000
KV_TOKENS = 128


def start_tracker(*flags: str) -> RunningProcess:
    return start(["-m", "services.tracker", "--listen", "127.0.0.1:0", *flags], READY)


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningProcess]:
    """For tests that leave nothing behind."""
    with start_tracker() as process:
        yield process


@pytest.fixture
def tracker() -> Iterator[RunningProcess]:
    with start_tracker("--deploy", "m", "--kv-tokens", str(KV_TOKENS)) as process:
        yield process


@pytest.fixture
async def channel(tracker: RunningProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.channel(tracker.match[1]) as channel:
        yield channel


def fake(channel: grpc.aio.Channel, node_id: str, room: int = ROOM) -> FakeNode:
    return FakeNode(channel, node(node_id, room), [manifest()])


async def follow(nodes: list[FakeNode], channel: grpc.aio.Channel) -> Topology:
    """All nodes obey what they are told until the model is covered; gives the topology that says so."""

    async def obey(one: FakeNode) -> None:
        async for directive in one.directives():
            await one.obey(directive)

    tasks = [asyncio.create_task(obey(one)) for one in nodes]
    stub: Any = tracker_pb2_grpc.TrackerStub(channel)
    topology = Topology()
    try:
        async with asyncio.timeout(DEADLINE):
            async for message in stub.WatchTopology(tracker_pb2.WatchTopologyRequest()):
                topology = topology.updated(convert.update_from_proto(message))
                if topology.coverage("m").complete:
                    return topology
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise AssertionError("the stream ended before the model was covered")


async def test_nodes_join_load_and_cover_the_model(tracker: RunningProcess, channel: grpc.aio.Channel) -> None:
    nodes = [fake(channel, f"n{i}") for i in (1, 2, 3)]
    for one in nodes:
        lease = await one.register()
        assert (lease.lease_seconds, lease.heartbeat_seconds) == (15.0, 3.0)
    topology = await follow(nodes, channel)
    assert {i: [str(s.layers) for s in n.shards] for i, n in topology.nodes.items()} == {
        "n1": ["0-10"],
        "n2": ["10-20"],
        "n3": ["20-30"],
    }
    assert topology.models["m"].kv_tokens == KV_TOKENS
    admin: Any = admin_pb2_grpc.AdminStub(channel)
    (route,) = (await admin.ListRoutes(admin_pb2.ListRoutesRequest())).routes
    assert [(hop.node_id, hop.layers.start, hop.layers.end) for hop in route.hops] == [
        ("n1", 0, 10),
        ("n2", 10, 20),
        ("n3", 20, 30),
    ]
    tracker.wait_for("model m covered")
    tracker.wait_for(r"directive finished: LOAD_SHARD m 0-10 on n1 is READY \(layers 0-10 of m have no node\)")


async def test_a_node_that_leaves_is_refilled(tracker: RunningProcess, channel: grpc.aio.Channel) -> None:
    nodes = [fake(channel, f"n{i}") for i in (1, 2, 3)]
    for one in nodes:
        await one.register()
    await follow(nodes, channel)
    await nodes[1].leave()
    admin: Any = admin_pb2_grpc.AdminStub(channel)
    (coverage,) = (await admin.GetCoverage(admin_pb2.GetCoverageRequest(model_id="m"))).models
    assert not coverage.complete
    assert [(r.start, r.end) for r in coverage.missing] == [(10, 20)]
    assert "fit on no node" in coverage.shortfall
    spare = fake(channel, "n4")
    await spare.register()
    topology = await follow([nodes[0], nodes[2], spare], channel)
    assert [str(s.layers) for s in topology.nodes["n4"].shards] == ["10-20"]
    tracker.wait_for("node n2 left")


async def test_silence_ends_a_lease() -> None:
    with start_tracker("--lease", "1.5", "--heartbeat", "0.3") as tracker:
        async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(DEADLINE):
            silent, alive = fake(channel, "silent"), fake(channel, "alive")
            await silent.register()
            await alive.register()
            stream = silent.directives()
            ended = asyncio.ensure_future(anext(stream))
            while not ended.done():
                await alive.heartbeat()
                await asyncio.wait([ended], timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await ended
            assert error.value.code() is grpc.StatusCode.NOT_FOUND
            assert rpc.error_code(error.value) == "unregistered"
            admin: Any = admin_pb2_grpc.AdminStub(channel)
            assert [n.node_id for n in (await admin.ListNodes(admin_pb2.ListNodesRequest())).nodes] == ["alive"]
            with pytest.raises(grpc.aio.AioRpcError, match="register again"):
                await silent.heartbeat()
            tracker.wait_for("node silent is suspect: nothing heard from it for 0.75 s")
            tracker.wait_for("node silent lost: nothing heard from it for 1.5 s")


async def test_open_directives_are_sent_again_to_a_new_stream(channel: grpc.aio.Channel) -> None:
    one = fake(channel, "n1", 31 * MB)
    await one.register()
    async with asyncio.timeout(DEADLINE):
        first = await anext(one.directives())
        await one.report(first, DirectiveState.ACCEPTED)
        again = await anext(one.directives())
    assert again.directive_id == first.directive_id
    assert again.state is DirectiveState.ACCEPTED
    assert (again.revision, again.kv_tokens) == ("r1", KV_TOKENS)


async def test_other_wire_versions_and_bad_addresses_are_refused(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="speaks wire version 2, this mesh speaks 1") as error:
        await fake(channel, "n1").register(wire_version=2)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    one = FakeNode(channel, node("n1", ROOM), [])
    object.__setattr__(one.node, "forward_address", "0.0.0.0:7710")
    with pytest.raises(grpc.aio.AioRpcError, match="others can reach") as error:
        await one.register()
    assert rpc.error_code(error.value) == "invalid_request"


async def test_an_empty_registration_is_an_error_and_no_crash(channel: grpc.aio.Channel) -> None:
    stub: Any = tracker_pb2_grpc.TrackerStub(channel)
    for call, request in (
        (stub.Register, tracker_pb2.RegisterRequest(wire_version=1)),
        (stub.ReportDirective, tracker_pb2.ReportDirectiveRequest()),
        (stub.Heartbeat, tracker_pb2.HeartbeatRequest()),
        (stub.Leave, tracker_pb2.LeaveRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(request)
        assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert (await stub.GetTopology(tracker_pb2.GetTopologyRequest())).nodes == []


async def test_sigterm_ends_open_streams_and_exits_with_0() -> None:
    with start_tracker() as tracker:
        async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(DEADLINE):
            stub: Any = tracker_pb2_grpc.TrackerStub(channel)
            stream = stub.WatchTopology(tracker_pb2.WatchTopologyRequest())
            await stream.read()
            stopping = asyncio.create_task(asyncio.to_thread(tracker.stop))
            assert await stream.read() is grpc.aio.EOF
            await stopping


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = subprocess.run(
            [sys.executable, "-m", "services.tracker", "--listen", address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    assert result.returncode == 1
    assert f"meshnet tracker: cannot listen on {address}" in result.stderr
    assert "Traceback" not in result.stderr


def test_settings_that_cannot_work_are_a_clear_error() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services.tracker", "--lease", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert result.returncode == 1
    assert "--heartbeat (3 s) must be above 0 and below --lease (1 s)" in result.stderr


def grpcurl(address: str, *args: str, data: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("grpcurl")
    body = [] if data is None else ["-d", json.dumps(data)]
    return subprocess.run(
        [str(tool), "-plaintext", *body, address, *args], capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def test_grpcurl_lists_and_describes_the_services(shared: RunningProcess) -> None:
    listed = grpcurl(shared.match[1], "list")
    assert listed.returncode == 0, listed.stderr
    assert {"meshnet.v1.Tracker", "meshnet.v1.Admin", "grpc.health.v1.Health"} <= set(listed.stdout.split())
    described = grpcurl(shared.match[1], "describe", "meshnet.v1.Admin")
    assert "rpc DeployModel ( .meshnet.v1.DeployModelRequest )" in described.stdout
    health = grpcurl(shared.match[1], "grpc.health.v1.Health/Check", data={"service": "meshnet.v1.Tracker"})
    assert json.loads(health.stdout) == {"status": "SERVING"}


def test_grpcurl_does_an_admins_work() -> None:
    with start_tracker() as tracker:
        address = tracker.match[1]
        unknown = grpcurl(address, "meshnet.v1.Admin/DeployModel", data={"model_id": "m"})
        assert unknown.returncode != 0
        assert "known models: none" in unknown.stderr
        assert "--model m=PATH" in unknown.stderr
        asyncio.run(_register(address))
        nodes = json.loads(grpcurl(address, "meshnet.v1.Admin/ListNodes", data={}).stdout)["nodes"]
        assert [n["node_id"] for n in nodes] == ["n1"]
        models = json.loads(grpcurl(address, "meshnet.v1.Admin/ListModels", data={}).stdout)["models"]
        assert [(m["manifest"]["model_id"], m["node_ids"]) for m in models] == [("m", ["n1"])]
        answer = json.loads(
            grpcurl(address, "meshnet.v1.Admin/DeployModel", data={"model_id": "m", "kv_tokens": KV_TOKENS}).stdout
        )
        (directive,) = answer["directives"]
        assert (directive["node_id"], directive["kind"], directive["layers"]) == (
            "n1",
            "DIRECTIVE_KIND_LOAD_SHARD",
            {"end": 30},
        )
        (coverage,) = json.loads(grpcurl(address, "meshnet.v1.Admin/GetCoverage", data={}).stdout)["models"]
        assert coverage["spans"] == [{"layers": {"end": 30}, "loading_node_ids": ["n1"]}]
        listed = json.loads(grpcurl(address, "meshnet.v1.Admin/ListDirectives", data={}).stdout)["directives"]
        assert [d["directive_id"] for d in listed] == [directive["directive_id"]]
        undeployed = grpcurl(address, "meshnet.v1.Admin/UndeployModel", data={"model_id": "m"})
        assert undeployed.returncode == 0
        assert grpcurl(address, "meshnet.v1.Admin/GetCoverage", data={"model_id": "m"}).returncode != 0


async def _register(address: str) -> None:
    async with rpc.channel(address) as channel:
        await fake(channel, "n1", 31 * MB).register()
