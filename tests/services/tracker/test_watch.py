from __future__ import annotations

import asyncio

import pytest

from meshnet.directive import Directive, DirectiveKind
from meshnet.errors import TopologyGap, Unregistered
from meshnet.model import LayerRange
from meshnet.topology import Topology
from services.tracker.watch import Changes, Updates, watch_directives, watch_topology
from tests.services.tracker.meshes import deployed, node

DEADLINE = 10.0


def directive(name: str) -> Directive:
    return Directive(name, "n1", DirectiveKind.LOAD_SHARD, "m", LayerRange(0, 1), 1, "test")


async def test_a_slow_watcher_gets_only_the_newest_topology() -> None:
    changes = Changes()
    current = Topology(version=1)
    stream = watch_topology(changes, lambda: current)
    async with asyncio.timeout(DEADLINE):
        assert (await anext(stream))[1].version == 1
        for version in range(2, 100):
            current = Topology(version=version)
            changes.notify()
        assert (await anext(stream))[1].version == 99
        waiting = asyncio.ensure_future(anext(stream))
        changes.notify()  # Nothing new in it: not sent again.
        current = Topology(version=100)
        changes.notify()
        assert (await waiting)[1].version == 100


async def test_after_the_whole_topology_only_changes_are_sent() -> None:
    changes = Changes()
    kept, gone, changed = node("kept", 1), node("gone", 1), node("changed", 1)
    current = Topology(1, {n.node_id: n for n in (kept, gone, changed)}, {"m": deployed()})
    updates = Updates(lambda update: update)
    stream = watch_topology(changes, lambda: current)
    async with asyncio.timeout(DEADLINE):
        first = updates.between(*await anext(stream))
        known = Topology().updated(first)
        assert (first.base_version, known) == (None, current)
        current = Topology(7, {"kept": kept, "changed": node("changed", 2), "new": node("new", 1)}, {})
        changes.notify()
        pair = await anext(stream)
        update = updates.between(*pair)
        assert updates.between(*pair) is update, "made once for all who watch"
        assert {n.node_id for n in update.nodes} == {"changed", "new"}
        assert (update.base_version, update.removed_node_ids, update.removed_model_ids) == (1, ("gone",), ("m",))
        assert known.updated(update) == current
        with pytest.raises(TopologyGap):
            current.updated(update)


async def test_directives_come_once_and_in_order() -> None:
    changes = Changes()
    open_ones = [directive("a"), directive("b")]
    stream = watch_directives(changes, lambda: open_ones)
    async with asyncio.timeout(DEADLINE):
        assert [(await anext(stream)).directive_id for _ in range(2)] == ["a", "b"]
        open_ones = [directive("b"), directive("c")]
        waiting = asyncio.ensure_future(anext(stream))
        changes.notify()
        assert (await waiting).directive_id == "c"


async def test_closing_ends_all_streams() -> None:
    changes = Changes()
    streams = [watch_topology(changes, Topology) for _ in range(3)]
    async with asyncio.timeout(DEADLINE):
        for stream in streams:
            await anext(stream)
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        changes.close()
        for future in waiting:
            with pytest.raises(StopAsyncIteration):
                await future
        assert [topology async for topology in watch_topology(changes, Topology)] == []


async def test_a_node_that_is_gone_ends_its_stream_with_an_error() -> None:
    changes = Changes()

    def open_directives() -> list[Directive]:
        raise Unregistered("gone")

    async with asyncio.timeout(DEADLINE):
        with pytest.raises(Unregistered):
            await anext(watch_directives(changes, open_directives))
