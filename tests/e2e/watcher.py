"""Follows the topology of a running mesh all the time, and finds each state that placement must never lead to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import grpc

from meshnet import convert
from meshnet.topology import Node, Topology
from meshnet.v1 import tracker_pb2, tracker_pb2_grpc
from tests.processes import wait_until

RETRY_SECONDS = 0.1


class Watcher:
    """Two rules hold in every state: no node holds more than it lends, and no layer that somebody serves loses its last
    holder while all nodes stay."""

    def __init__(self, tracker_address: str) -> None:
        self._address = tracker_address
        self._faults: list[str] = []
        self.num_seen = 0
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Requires that no fault was seen so far."""
        assert not self._faults, "\n".join(self._faults)

    def close(self) -> None:
        self._closed.set()
        if self._call:
            self._call.cancel()
        self._thread.join(10)

    def _follow(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(self._address) as channel:
                self._watch(tracker_pb2_grpc.TrackerStub(channel))
            self._closed.wait(RETRY_SECONDS)

    def _watch(self, stub: tracker_pb2_grpc.TrackerStub) -> None:
        call = stub.WatchTopology(tracker_pb2.WatchTopologyRequest())
        self._call = call
        before, topology = None, Topology()
        for message in call:
            topology = topology.updated(convert.update_from_proto(message))
            self._faults += [fault for node in topology.nodes.values() if (fault := _overfull(topology, node))]
            if before is not None:
                self._faults += _lost_layers(before, topology)
            before = topology
            self.num_seen += 1


@contextlib.contextmanager
def watching(tracker_address: str) -> Iterator[Watcher]:
    watcher = Watcher(tracker_address)
    try:
        wait_until(lambda: watcher.num_seen, 30, "the watcher sees the topology")
        yield watcher
    finally:
        watcher.close()


def _overfull(topology: Topology, node: Node) -> str:
    held = node.workspace_bytes or 0
    for shard in node.shards:
        model = topology.models.get(shard.model_id)
        if model:
            kv = model.kv_tokens, model.kv_precision
            held += model.manifest.shard_bytes(shard.layers, shard.quantization, *kv)
    return f"{node.node_id} lends {node.vram_bytes} and holds {held}: {node.shards}" if held > node.vram_bytes else ""


def _lost_layers(before: Topology, after: Topology) -> list[str]:
    if before.nodes.keys() - after.nodes.keys():
        return []
    return [
        f"layer {layer} of {model_id} was served by {sorted(was)}, is served by nobody"
        for model_id in before.models.keys() & after.models.keys()
        for layer, (was, now) in enumerate(zip(holders(before, model_id), holders(after, model_id), strict=True))
        if was and not now
    ]


def holders(topology: Topology, model_id: str) -> list[set[str]]:
    """By layer the nodes that serve it."""
    num_layers = topology.models[model_id].manifest.num_layers
    layers = {node_id: node.layers(model_id) for node_id, node in topology.nodes.items()}
    return [{node_id for node_id in layers if layer in layers[node_id]} for layer in range(num_layers)]
