"""The tracker is killed at bad moments and started again with the same state file."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshnet import convert, rpc
from meshnet.directive import DirectiveState
from meshnet.topology import ShardState, Topology
from meshnet.v1 import admin_pb2, admin_pb2_grpc, tracker_pb2, tracker_pb2_grpc
from tests.processes import ROOT, RunningProcess
from tests.services.tracker.fake_node import FakeNode
from tests.services.tracker.meshes import MB, node, shard
from tests.services.tracker.test_tracker_process import DEADLINE, KV_TOKENS, fake, follow, start_tracker


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@asynccontextmanager
async def running(state: Path, *flags: str) -> AsyncIterator[tuple[RunningProcess, grpc.aio.Channel]]:
    with start_tracker("--state", str(state), *flags) as tracker:
        async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(2 * DEADLINE):
            yield tracker, channel


async def deploy(channel: grpc.aio.Channel, priority: int = 0) -> None:
    admin: Any = admin_pb2_grpc.AdminStub(channel)
    request = admin_pb2.DeployModelRequest(model_id="m", kv_tokens=KV_TOKENS, priority=priority)
    await admin.DeployModel(request)


async def topology(channel: grpc.aio.Channel) -> Topology:
    stub: Any = tracker_pb2_grpc.TrackerStub(channel)
    return convert.topology_from_proto(await stub.GetTopology(tracker_pb2.GetTopologyRequest()))


async def num_directives(channel: grpc.aio.Channel) -> int:
    admin: Any = admin_pb2_grpc.AdminStub(channel)
    return len((await admin.ListDirectives(admin_pb2.ListDirectivesRequest())).directives)


def moved(one: FakeNode, channel: grpc.aio.Channel) -> FakeNode:
    """The same process of a node, which has found the new tracker."""
    again = FakeNode(channel, one.node, one.manifests)
    again.incarnation = one.incarnation
    return again


async def test_a_killed_tracker_knows_its_models_and_reloads_nothing(state: Path) -> None:
    async with running(state) as (tracker, channel):
        nodes = [fake(channel, f"n{i}") for i in (1, 2, 3)]
        for one in nodes:
            await one.register()
        await deploy(channel, priority=7)
        before = await follow(nodes, channel)
        tracker.kill()
    async with running(state) as (tracker, channel):
        first = await topology(channel)
        assert first.models == before.models
        assert (first.models["m"].kv_tokens, first.models["m"].priority) == (KV_TOKENS, 7)
        assert first.version > before.version
        tracker.wait_for("model m is deployed, as before the restart")
        # One that holds nothing is there first: it must not be told to load what the others hold.
        await fake(channel, "early", MB // 2).register()
        for one in nodes:
            assert not (await topology(channel)).coverage("m").complete
            await moved(one, channel).register()
        after = await topology(channel)
        assert after.coverage("m").complete
        assert [after.nodes[i].shards for i in ("n1", "n2", "n3")] == [
            before.nodes[i].shards for i in ("n1", "n2", "n3")
        ]
        assert await num_directives(channel) == 0


async def test_killed_in_the_middle_of_a_load(state: Path) -> None:
    async with running(state) as (tracker, channel):
        one = fake(channel, "n1", 31 * MB)
        await one.register()
        await deploy(channel)
        directive = await anext(one.directives())
        directive = await one.report(directive, DirectiveState.ACCEPTED)
        await one.report(directive, DirectiveState.LOADING)
        tracker.kill()
    async with running(state) as (tracker, channel):
        # An empty node with room for all of it is there first.
        other = fake(channel, "n2", 31 * MB)
        await other.register()
        one = moved(one, channel)
        one.node = replace(one.node, shards=(shard(0, 30, state=ShardState.LOADING),))
        assert await num_directives(channel) == 0
        await one.register()
        loading = (await topology(channel)).coverage("m").spans
        assert [(span.ready, span.loading) for span in loading] == [((), ("n1", "n2"))]
        one.node = replace(one.node, shards=(shard(0, 30),))
        await one.heartbeat()
        assert (await topology(channel)).coverage("m").complete
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        listed = (await admin.ListDirectives(admin_pb2.ListDirectivesRequest())).directives
        assert [(d.node_id, d.reason) for d in listed] == [("n2", "second replica of layers 0-30 of m")]


async def test_an_undeploy_is_remembered_whatever_the_flags(state: Path) -> None:
    async with running(state, "--deploy", "m") as (tracker, channel):
        await fake(channel, "n1", 31 * MB).register()
        assert list((await topology(channel)).models) == ["m"]
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        await admin.UndeployModel(admin_pb2.UndeployModelRequest(model_id="m"))
        tracker.kill()
    async with running(state, "--deploy", "m") as (tracker, channel):
        await fake(channel, "n1", 31 * MB).register()
        assert (await topology(channel)).models == {}
        tracker.wait_for("model m stays undeployed")
        await deploy(channel)
        tracker.kill()
    async with running(state) as (_, channel):
        assert list((await topology(channel)).models) == ["m"]


async def test_limits_and_evictions_outlive_the_tracker(state: Path) -> None:
    async with running(state) as (tracker, channel):
        one, other = fake(channel, "n1", 31 * MB), fake(channel, "n2", 31 * MB)
        await one.register()
        await other.register()
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        request = admin_pb2.DeployModelRequest(model_id="m", context_length=256, sessions=2, replicas=1)
        await admin.DeployModel(request)
        await admin.EvictNode(admin_pb2.EvictNodeRequest(node_id="n2"))
        tracker.kill()
    async with running(state) as (_, channel):
        model = (await topology(channel)).models["m"]
        assert (model.context_length, model.kv_tokens, model.replicas) == (256, 512, 1)
        await moved(one, channel).register()
        with pytest.raises(grpc.aio.AioRpcError, match="was evicted"):
            await moved(other, channel).register()
        await fake(channel, "n2", 31 * MB).register()
        assert list((await topology(channel)).nodes) == ["n1", "n2"]


async def test_without_a_state_file_a_restart_forgets() -> None:
    for _ in range(2):
        with start_tracker() as tracker:
            async with rpc.channel(tracker.match[1]) as channel:
                assert (await topology(channel)).models == {}
                await FakeNode(channel, node("n1", 31 * MB), fake(channel, "n1").manifests).register()
                await deploy(channel)
                tracker.kill()


def refusal(state: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "services.tracker", "--listen", "127.0.0.1:0", "--state", str(state)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    return result.stderr


def test_a_file_that_is_no_state_is_one_clear_line(state: Path) -> None:
    state.write_bytes(b"not a database at all" * 500)
    assert refusal(state) == f"meshnet tracker: the state file {state} cannot be opened: file is not a database\n"
    assert state.read_bytes() == b"not a database at all" * 500


async def test_two_trackers_never_share_a_state(state: Path) -> None:
    async with running(state):
        assert refusal(state) == f"meshnet tracker: the state file {state} cannot be opened: another tracker uses it\n"
