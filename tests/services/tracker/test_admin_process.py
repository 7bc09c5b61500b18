"""Plans, nodes and events of a running tracker, asked for with grpcurl and on the command line."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshnet import rpc
from meshnet.directive import DirectiveState
from tests.processes import ROOT, RunningProcess
from tests.services.tracker.fake_node import FakeNode
from tests.services.tracker.meshes import MB, manifest, node, shard
from tests.services.tracker.test_drain_process import meshnet
from tests.services.tracker.test_tracker_process import DEADLINE, KV_TOKENS, fake, follow, grpcurl, start_tracker

ADMIN = "meshnet.v1.Admin"
# The nodes here send no heartbeats.
PATIENT = ("--lease", "600", "--suspect", "600")


@pytest.fixture
async def mesh() -> AsyncIterator[tuple[RunningProcess, grpc.aio.Channel]]:
    """Model m on n1, and n2 with room for all of it that loads a second replica."""
    with start_tracker("--deploy", "m", "--kv-tokens", str(KV_TOKENS), *PATIENT) as tracker:
        async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(3 * DEADLINE):
            one, other = fake(channel, "n1", 31 * MB), fake(channel, "n2", 31 * MB)
            await one.register()
            await follow([one], channel)
            await other.register()
            directive = await anext(other.directives())
            await other.report(directive, DirectiveState.ACCEPTED)
            yield tracker, channel


async def asked(tracker: RunningProcess, method: str, data: dict[str, Any]) -> Any:
    answer = await asyncio.to_thread(grpcurl, tracker.match[1], f"{ADMIN}/{method}", data=data)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


async def refused(tracker: RunningProcess, method: str, data: dict[str, Any]) -> str:
    answer = await asyncio.to_thread(grpcurl, tracker.match[1], f"{ADMIN}/{method}", data=data)
    assert answer.returncode != 0
    return answer.stderr


async def said(tracker: RunningProcess, *args: str) -> str:
    answer = await asyncio.to_thread(meshnet, tracker.match[1], *args)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


async def test_grpcurl_describes_plans_and_watches(mesh: tuple[RunningProcess, grpc.aio.Channel]) -> None:
    tracker, _ = mesh
    told = await asked(tracker, "DescribeNode", {"node_id": "n2"})
    assert told["node"]["shards"][0]["state"] == "SHARD_STATE_LOADING"
    assert int(told["planned_bytes"]) == 30 * (MB + KV_TOKENS)
    assert int(told["free_bytes"]) == MB - 30 * KV_TOKENS
    assert "believed_bytes" not in told
    (directive,) = told["directives"]
    assert (directive["reason"], directive["state"]) == (
        "second replica of layers 0-30 of m",
        "DIRECTIVE_STATE_ACCEPTED",
    )
    assert directive["issued_unix_seconds"] > 1.6e9
    assert await asked(tracker, "GetPlan", {}) == {}
    without = await asked(tracker, "GetPlan", {"without_node_ids": ["n1", "n2"]})
    assert "layers 0-30 of m" in without["shortfalls"][0]
    assert "directives" not in without
    events = await asyncio.to_thread(
        grpcurl, tracker.match[1], f"{ADMIN}/WatchEvents", data={"past": 2, "past_only": True}
    )
    assert events.returncode == 0, events.stderr
    assert "node n2 joined" in events.stdout
    assert '"text": "directive issued: LOAD_SHARD m 0-30 on n2: second replica of layers 0-30 of m"' in events.stdout
    assert await asked(tracker, "Rebalance", {}) == {}


async def test_what_is_not_there_is_refused_clearly(mesh: tuple[RunningProcess, grpc.aio.Channel]) -> None:
    tracker, _ = mesh
    error = await refused(tracker, "DescribeNode", {"node_id": "n9"})
    assert "NotFound" in error
    assert "node 'n9' is not registered; nodes: n1, n2" in error
    error = await refused(tracker, "GetPlan", {"without_node_ids": ["n1", "n9", "n8"]})
    assert "InvalidArgument" in error
    assert "no such nodes: 'n8', 'n9'; nodes: n1, n2" in error
    assert "no node has the files of model 'x'" in await refused(tracker, "GetPlan", {"deploy": {"model_id": "x"}})
    error = await refused(tracker, "GetPlan", {"deploy": {"model_id": "m", "context_length": 5000}})
    assert "made for 1024 tokens" in error


async def test_a_watcher_sees_what_happens_until_the_tracker_stops() -> None:
    with start_tracker(*PATIENT) as tracker:
        tool = str(Path(sys.executable).with_name("grpcurl"))
        data = json.dumps({"past": 100})
        watching = await asyncio.create_subprocess_exec(
            tool, "-plaintext", "-d", data, tracker.match[1], f"{ADMIN}/WatchEvents", stdout=subprocess.PIPE
        )
        assert watching.stdout
        async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(DEADLINE):
            for index in (1, 2):
                await fake(channel, f"n{index}").register()
                while f"node n{index} joined".encode() not in await watching.stdout.readline():
                    assert not watching.stdout.at_eof()
            stopping = asyncio.create_task(asyncio.to_thread(tracker.stop))
            assert await watching.wait() == 0
            await stopping


async def test_the_commands_tell_the_same(mesh: tuple[RunningProcess, grpc.aio.Channel]) -> None:
    tracker, _ = mesh
    picture = await said(tracker, "describe", "n2")
    assert "lends 47.8 MB" in picture
    assert "used 30.0 MB" in picture
    assert "LOAD m 0-30" in picture
    assert json.loads(await said(tracker, "describe", "n2", "--json"))["planned_bytes"] == 30 * (MB + KV_TOKENS)
    history = await said(tracker, "directives")
    assert "layers 0-30 of m have no node" in history
    assert "ACCEPTED" in history
    assert [d["node_id"] for d in json.loads(await said(tracker, "directives", "n2", "--json"))] == ["n2"]
    assert "No directives for n9" in await said(tracker, "directives", "n9")
    assert await said(tracker, "plan") == "nothing to do\n"
    assert "layers 0-30 of m" in await said(tracker, "plan", "--without", "n1", "--without", "n2")
    unknown = await asyncio.to_thread(meshnet, tracker.match[1], "plan", "--without", "n9")
    assert unknown.returncode == 1
    assert "no such nodes: 'n9'; nodes: n1, n2" in unknown.stderr
    listed = await said(tracker, "events", "--no-follow", "--past", "1")
    assert listed.count("\n") == 1
    assert "directive issued: LOAD_SHARD m 0-30 on n2" in listed
    events = [json.loads(line) for line in (await said(tracker, "events", "--no-follow", "--json")).splitlines()]
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))


async def test_a_deployment_has_its_limits_from_the_command_line() -> None:
    with start_tracker(*PATIENT) as tracker:
        async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(2 * DEADLINE):
            await fake(channel, "n1", 31 * MB).register()
            plan = await said(tracker, "plan", "--deploy", "m", "--context", "64", "--sessions", "4")
            assert "layers 0-30 of m have no node" in plan
            assert "LOAD" in plan
            assert "30.0 MB" in plan
            await said(tracker, "deploy", "m", "--context", "64", "--sessions", "4", "--replicas", "1")
            listed = await said(tracker, "events", "--no-follow")
            assert "KV cache room for 512 tokens for sequences of up to 64, priority 0, at most 1 replicas" in listed


async def test_rebalance_asks_before_it_acts() -> None:
    flags = (*PATIENT, "--heartbeat", "1", "--deploy", "a", "--deploy", "b", "--kv-tokens", str(KV_TOKENS))
    with start_tracker(*flags) as tracker:
        async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(3 * DEADLINE):
            for index, held in enumerate("aaaabb"):
                one = node(f"n{index}", 10 * (MB + KV_TOKENS), "a", "b", shards=[shard(0, 10, held)])
                await FakeNode(channel, one, [manifest("a", 10), manifest("b", 10)]).register()
            # Nodes that bring layers look like a restart: others may follow.
            while "placing begins" not in await said(tracker, "events", "--no-follow"):
                pass
            for answer, code in ((b"n\n", 1), (b"y\n", 0)):
                said_so, asked_for = await _rebalance(tracker.match[1], answer)
                assert said_so == code, asked_for
                assert "n0    DROP   a      0-10    10.0 MB" in asked_for
                assert "n0    LOAD   b      0-10    10.0 MB" in asked_for
                ordered = json.loads(await said(tracker, "directives", "--json"))
                assert len(ordered) == (0 if code else 2)
            assert json.loads(await said(tracker, "rebalance", "--yes", "--json")) == []


async def test_following_ends_with_the_tracker_or_on_ctrl_c() -> None:
    for ends_by_itself in (True, False):
        with start_tracker(*PATIENT) as tracker:
            async with rpc.channel(tracker.match[1]) as channel, asyncio.timeout(2 * DEADLINE):
                following = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "meshnet.cli", "events", "--tracker", tracker.match[1]),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                await fake(channel, "n1").register()
                assert following.stdout
                assert b"node n1 joined" in await following.stdout.readline()
                if ends_by_itself:
                    await asyncio.to_thread(tracker.stop)
                else:
                    following.send_signal(signal.SIGINT)
                _, errors = await following.communicate()
                assert following.returncode == (1 if ends_by_itself else 0), errors
                assert (b"has stopped" in errors) == ends_by_itself
                assert b"Traceback" not in errors


async def _rebalance(address: str, answer: bytes) -> tuple[int | None, str]:
    command = (sys.executable, "-m", "meshnet.cli", "rebalance", "--tracker", address)
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate(answer)
    return process.returncode, output.decode()
