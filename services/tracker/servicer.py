"""The gRPC service of the tracker for nodes and gateways. It only translates between messages and the mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from meshnet import convert
from meshnet.directive import Directive
from meshnet.errors import InvalidRequest, WireVersionMismatch
from meshnet.rpc import translates_errors, translates_stream_errors
from meshnet.v1 import common_pb2, tracker_pb2, tracker_pb2_grpc
from meshnet.wire import WIRE_VERSION
from services.tracker.tracker import Tracker
from services.tracker.watch import Updates, watch_directives, watch_topology

Context = Any

MAX_PING_BYTES = 1 << 20


class TrackerServicer(tracker_pb2_grpc.TrackerServicer):
    """For nodes and gateways."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._mesh = tracker.mesh
        self._updates = Updates(convert.update_to_proto)

    @translates_errors
    async def Register(  # noqa: N802
        self, request: tracker_pb2.RegisterRequest, context: Context
    ) -> tracker_pb2.RegisterResponse:
        if request.wire_version != WIRE_VERSION:
            raise WireVersionMismatch(
                f"node {request.node.node_id!r} speaks wire version {request.wire_version}, "
                f"this mesh speaks {WIRE_VERSION}: run the same meshnet version on all nodes"
            )
        node = convert.node_from_proto(request.node)
        manifests = [convert.manifest_from_proto(manifest) for manifest in request.manifests]
        self._tracker.apply(
            self._mesh.register(
                node,
                request.incarnation,
                manifests,
                self._tracker.now(),
                newest_plan_version=request.newest_plan_version,
            )
        )
        config = self._tracker.config
        refused = self._mesh.refused_models(manifests, fetches=node.fetches)
        return tracker_pb2.RegisterResponse(
            lease_seconds=config.lease_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
            refused_models=[tracker_pb2.RefusedModel(model_id=i, reason=why) for i, why in refused.items()],
        )

    @translates_errors
    async def Heartbeat(  # noqa: N802
        self, request: tracker_pb2.HeartbeatRequest, context: Context
    ) -> tracker_pb2.HeartbeatResponse:
        effects = self._mesh.heartbeat(
            request.node_id,
            request.incarnation,
            [convert.shard_from_proto(shard) for shard in request.shards],
            self._tracker.now(),
            num_sessions=request.num_sessions,
            resident_bytes=request.resident_bytes,
            kv_tokens_free=request.kv_tokens_free,
            queue_length=request.queue_length,
            memory_free_bytes=request.memory_free_bytes if request.HasField("memory_free_bytes") else None,
            workspace_bytes=request.workspace_bytes if request.HasField("workspace_bytes") else None,
            speeds=[convert.speed_from_proto(speed) for speed in request.speeds],
            links=[convert.link_from_proto(link) for link in request.links],
            probes=[convert.probe_from_proto(probe) for probe in request.probes],
        )
        self._tracker.apply(effects)
        return tracker_pb2.HeartbeatResponse()

    @translates_stream_errors
    async def WatchDirectives(  # noqa: N802
        self, request: tracker_pb2.WatchDirectivesRequest, context: Context
    ) -> AsyncIterator[tracker_pb2.Directive]:
        def open_directives() -> tuple[Directive, ...]:
            self._mesh.registry.member(request.node_id, request.incarnation)
            return self._mesh.ledger.open(request.node_id)

        async for directive in watch_directives(self._tracker.changes, open_directives):
            yield convert.directive_to_proto(directive)

    @translates_errors
    async def ReportDirective(  # noqa: N802
        self, request: tracker_pb2.ReportDirectiveRequest, context: Context
    ) -> tracker_pb2.ReportDirectiveResponse:
        effects = self._mesh.report(
            request.node_id,
            request.incarnation,
            request.directive_id,
            convert.directive_state_from_proto(request.state),
            [convert.shard_from_proto(shard) for shard in request.shards],
            self._tracker.now(),
            bytes_done=request.bytes_done,
            bytes_total=request.bytes_total,
            failure=request.failure,
            failure_kind=convert.failure_kind_from_proto(request.failure_kind),
            newest_plan_version=request.newest_plan_version,
        )
        self._tracker.apply(effects)
        return tracker_pb2.ReportDirectiveResponse()

    @translates_errors
    async def Leave(self, request: tracker_pb2.LeaveRequest, context: Context) -> tracker_pb2.LeaveResponse:  # noqa: N802
        self._tracker.apply(self._mesh.leave(request.node_id, request.incarnation, self._tracker.now()))
        return tracker_pb2.LeaveResponse()

    @translates_errors
    async def GetTopology(  # noqa: N802
        self, request: tracker_pb2.GetTopologyRequest, context: Context
    ) -> common_pb2.Topology:
        return convert.topology_to_proto(self._mesh.topology)

    @translates_stream_errors
    async def WatchTopology(  # noqa: N802
        self, request: tracker_pb2.WatchTopologyRequest, context: Context
    ) -> AsyncIterator[common_pb2.TopologyUpdate]:
        async for seen, topology in watch_topology(self._tracker.changes, lambda: self._mesh.topology):
            yield self._updates.between(seen, topology)

    @translates_errors
    async def Ping(self, request: tracker_pb2.PingRequest, context: Context) -> tracker_pb2.PingResponse:  # noqa: N802
        if request.answer_bytes > MAX_PING_BYTES:
            raise InvalidRequest(f"a ping of {request.answer_bytes} bytes is over the limit of {MAX_PING_BYTES}")
        return tracker_pb2.PingResponse(payload=bytes(request.answer_bytes))
