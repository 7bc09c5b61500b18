"""A node, put together: HTTP for frames, gRPC for prompts, and the link to the tracker."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import psutil

from meshnet import __version__, rpc
from meshnet.addresses import join_address, split_address
from meshnet.model import ModelManifest
from meshnet.topology import Node, Topology
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from meshnet.wire import WIRE_VERSION
from services.node.agent import Agent
from services.node.config import NodeConfig
from services.node.core.sessions import SessionTable
from services.node.core.shards import ShardTable
from services.node.core.work import Executor
from services.node.directive_worker import DirectiveWorker
from services.node.entry import EntryPoint
from services.node.fetching.mesh_weights import MeshWeights
from services.node.fetching.source import Source
from services.node.forwarding import Forwarding
from services.node.http_server import HttpServer
from services.node.inference_servicer import InferenceServicer
from services.node.link_prober import LinkProber
from services.node.measuring import Measuring
from services.node.peers import Peers
from services.node.prober import Prober
from services.node.runner import Runner
from services.node.tracker_client import TrackerClient

log = logging.getLogger(__name__)

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
SWEEP_SECONDS = 5.0
# What is free of the device's memory changes all the time: smaller changes are no news.
FREE_STEP_BYTES = 16 << 20


class NodeServer:
    """One node process. Make it inside the event loop that runs it."""

    def __init__(
        self,
        config: NodeConfig,
        executor: Executor,
        manifests: dict[str, ModelManifest],
        hub: Mapping[str, Source] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self._manifests = manifests
        self._shards = ShardTable()
        self._sessions = SessionTable()
        self._runner = Runner(executor, lambda works, seconds: self._measuring.observe(works, seconds))
        self._tracker = TrackerClient(config.tracker_address, config.node_id, uuid.uuid4().hex, config.secret)
        self._agent = Agent(self._tracker, self.describe, list(manifests.values()))
        self._peers = Peers(
            lambda: self._agent.topology,
            config.compression,
            config.hop_timeout,
            lambda node_id: self._links.bytes_per_second(node_id),
            config.secret,
        )
        self._forwarding = Forwarding(
            self._shards,
            self._sessions,
            self._runner,
            self._peers,
            config.reorder_timeout,
            node_id=config.node_id,
            keeps=config.prefix_reuse,
            on_broken=lambda model_id: self._worker.give_up(model_id),
        )
        self._prober = Prober(
            config.node_id,
            self._forwarding,
            lambda: self._agent.topology,
            config.probe_timeout,
            self._agent.announce,
        )
        self._links = LinkProber(
            config.node_id,
            self._tracker,
            self._peers,
            lambda: self._agent.topology,
            lambda: self._runner.queue_length,
            self._agent.announce,
        )
        self._entry = EntryPoint(config, self._forwarding, self._prober)
        loads = asyncio.Lock()
        files_here = {model_id: manifest for model_id, manifest in manifests.items() if model_id in config.models}
        self._measuring = Measuring(config, files_here, self._runner, self._shards, loads, self._agent.announce)
        self._mesh_weights = _mesh_weights(config, lambda: self._agent.topology, hub)
        self._worker = DirectiveWorker(
            config, manifests, self._forwarding, self._agent.report, loads, self._mesh_weights, self._agent.announce
        )
        self._http = HttpServer(config, self._forwarding, self.health, self._mesh_weights)
        self._grpc = rpc.server(config.secret)
        self.forward_address = self.grpc_address = ""

    async def start(self) -> None:
        """Begins to listen. Raises OSError or RuntimeError if a port is taken."""
        listening = await self._http.start(self.config.forward_listen)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(self._entry), self._grpc)
        await rpc.add_reflection_and_health(self._grpc, INFERENCE)
        port = self._grpc.add_insecure_port(self.config.grpc_listen)
        await self._grpc.start()
        self.forward_address = join_address(self.config.advertise_host, split_address(listening)[1])
        self.grpc_address = join_address(self.config.advertise_host, port)

    async def run(self) -> None:
        """Serves for ever. Raises InvalidRequest if the tracker refuses this node for good."""
        async with asyncio.TaskGroup() as group:
            group.create_task(
                self._agent.run(
                    self._worker.accept, self._on_topology, self._forwarding.node_lost, self._worker.forget_waiting
                )
            )
            group.create_task(self._peers.watch())
            group.create_task(self._links.run())
            group.create_task(self._prober.run())
            group.create_task(self._measuring.run())
            group.create_task(self._worker.run())
            group.create_task(self._sweep())

    async def stop(self) -> None:
        """Leaves the mesh, ends what runs, closes all."""
        self._forwarding.draining = True
        if self._mesh_weights:
            self._mesh_weights.stop()
        await self._agent.leave()
        await self._entry.stop()
        await self._grpc.stop(grace=1)
        await self._http.stop()
        await self._peers.close()
        await self._tracker.close()
        self._runner.stop()

    def describe(self) -> Node:
        """The node as it is now."""
        free_bytes = self._runner.executor.memory_free_bytes()
        return Node(
            node_id=self.config.node_id,
            forward_address=self.forward_address,
            grpc_address=self.grpc_address,
            vram_bytes=self.config.vram_bytes,
            quantization=self.config.quantization,
            fallbacks=self.config.fallbacks,
            fetches=self.config.fetches,
            site=self.config.site,
            shards=self._shards.listing(),
            available_models=frozenset(self._manifests),
            stub=self.config.stub,
            tracker_node=self.config.tracker_node,
            num_sessions=len(self._sessions),
            resident_bytes=psutil.Process().memory_info().rss,
            kv_tokens_free=self._sessions.free_tokens(),
            software_version=__version__,
            device="stub" if self.config.stub else self.config.device,
            probes=self._prober.outcomes(),
            memory_free_bytes=None if free_bytes is None else free_bytes - free_bytes % FREE_STEP_BYTES,
            workspace_bytes=self._shards.workspace_bytes(),
            queue_length=self._runner.queue_length,
            speeds=self._measuring.speeds(),
            links=self._links.links(),
        )

    def health(self) -> dict[str, Any]:
        node = self.describe()
        return {
            "status": "draining" if self._forwarding.draining else "ok",
            "node": node.node_id,
            "stub": node.stub,
            "registered": self._agent.registered.is_set(),
            "version": node.software_version,
            "wire_version": WIRE_VERSION,
            "device": node.device,
            "vram_bytes": node.vram_bytes,
            "resident_bytes": node.resident_bytes,
            "memory_free_bytes": node.memory_free_bytes,
            "workspace_bytes": node.workspace_bytes,
            "shards": [
                {
                    "model": shard.model_id,
                    "layers": [shard.layers.start, shard.layers.end],
                    "quantization": shard.quantization.value,
                    "state": shard.state.value,
                    "bytes_done": shard.bytes_done,
                    "bytes_total": shard.bytes_total,
                }
                for shard in node.shards
            ],
            "speeds": [
                {
                    "model": speed.model_id,
                    "quantization": speed.quantization.value,
                    "prefill_tokens_per_second": speed.prefill_tokens_per_second,
                    "decode_tokens_per_second": speed.decode_tokens_per_second,
                }
                for speed in node.speeds
            ],
            "links": [asdict(link) for link in node.links],
            "sessions": node.num_sessions,
            "generations": self._entry.num_running,
            "drafts": asdict(self._entry.draft_counts),
            "queue": self._runner.queue_length,
            "kv": {
                model_id: {
                    "tokens": self._sessions.ledger(model_id).capacity_tokens,
                    "tokens_free": self._sessions.ledger(model_id).free_tokens,
                    "tokens_kept": self._sessions.ledger(model_id).kept_tokens,
                }
                for model_id in self._shards.models()
            },
        }

    def _on_topology(self) -> None:
        self._prober.wake()
        self._forwarding.changes.announce()

    async def _sweep(self) -> None:
        """Frees sessions whose lease has run out: their end was lost on the way. And what is kept that nobody uses."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            idle = self._sessions.idle_since(time.monotonic() - self.config.session_lease)
            if idle:
                log.info("%d idle sessions freed", len(idle))
                self._forwarding.close(idle)
            self._forwarding.close(self._sessions.kept_since(time.monotonic() - self.config.kept_lease))


def _mesh_weights(
    config: NodeConfig, topology: Callable[[], Topology], hub: Mapping[str, Source]
) -> MeshWeights | None:
    root = config.weights_dir
    if root is None or not (config.fetches or hub):
        return None
    return MeshWeights(root, config.node_id, config.site, topology, hub, config.secret)
