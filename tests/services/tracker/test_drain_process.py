"""Nodes of a running tracker are drained and evicted from the command line."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import grpc
import pytest

from meshnet import convert, rpc
from meshnet.v1 import tracker_pb2, tracker_pb2_grpc
from tests.processes import ROOT
from tests.services.tracker.meshes import MB
from tests.services.tracker.test_tracker_process import DEADLINE, fake, follow, start_tracker


def meshnet(address: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshnet.cli", *args, "--tracker", address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


async def test_nodes_are_drained_and_evicted_from_the_command_line() -> None:
    with start_tracker("--deploy", "m", "--kv-tokens", "16") as tracker:
        async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(2 * DEADLINE):
            await _drain_and_evict(tracker.match[1], channel)


async def _drain_and_evict(address: str, channel: grpc.aio.Channel) -> None:
    one = fake(channel, "n1", 31 * MB)
    await one.register()
    await follow([one], channel)
    drained = await asyncio.to_thread(meshnet, address, "drain", "n1")
    assert drained.returncode == 0, drained.stderr
    assert "n1 is drained" in drained.stdout
    assert "layers 0-30 of m" in drained.stdout
    status = await asyncio.to_thread(meshnet, address, "status")
    assert "n1 draining" in status.stdout
    other = fake(channel, "n2", 31 * MB)
    await other.register()
    moving = asyncio.create_task(other.obey(await anext(other.directives())))
    async for directive in one.directives():
        await moving
        await one.obey(directive)
        break
    stub: Any = tracker_pb2_grpc.TrackerStub(channel)
    topology = convert.topology_from_proto(await stub.GetTopology(tracker_pb2.GetTopologyRequest()))
    assert {i: [str(s.layers) for s in n.shards] for i, n in topology.nodes.items()} == {"n1": [], "n2": ["0-30"]}
    evicted = await asyncio.to_thread(meshnet, address, "evict", "n1")
    assert evicted.returncode == 0, evicted.stderr
    with pytest.raises(grpc.aio.AioRpcError, match="was evicted") as error:
        await one.register()
    assert rpc.error_code(error.value) == "invalid_request"
    again = await asyncio.to_thread(meshnet, address, "evict", "n1")
    assert again.returncode == 1
    assert "node 'n1' is not registered; nodes: n2" in again.stderr
