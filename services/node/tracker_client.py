"""The tracker as a node sees it: typed calls over one gRPC channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from meshnet import convert, rpc
from meshnet.directive import Directive
from meshnet.errors import InvalidRequest, MeshnetError, Unregistered
from meshnet.model import ModelManifest
from meshnet.security.shared_secret import SharedSecret
from meshnet.topology import Node, Shard, Topology
from meshnet.v1 import tracker_pb2, tracker_pb2_grpc
from meshnet.wire import WIRE_VERSION

CALL_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class Lease:
    """How long the tracker waits for a sign of life, and how often to give one, in seconds. `refused_models`: those of
    which the node gets no layers, with the reasons."""

    lease_seconds: float
    heartbeat_seconds: float
    refused_models: dict[str, str]


class TrackerUnreachable(MeshnetError):
    """The call did not get through; trying again later may help."""

    code = "tracker_unreachable"
    status = 503


class TrackerClient:
    """Raises Unregistered, InvalidRequest or TrackerUnreachable from every call."""

    def __init__(self, address: str, node_id: str, incarnation: str, secret: SharedSecret | None = None) -> None:
        self.address = address
        self._node_id, self._incarnation = node_id, incarnation
        self._secret = secret
        self._connect()

    def _connect(self) -> None:
        self._channel = rpc.channel(self.address, self._secret)
        self._stub = tracker_pb2_grpc.TrackerStub(self._channel)

    async def reconnect(self) -> None:
        """Over a new connection. One whose bytes were changed on their way may answer pings for ever and no calls."""
        await self.close()
        self._connect()

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def register(self, node: Node, manifests: list[ModelManifest], newest_plan_version: int) -> Lease:
        request = tracker_pb2.RegisterRequest(
            node=convert.node_to_proto(node),
            incarnation=self._incarnation,
            manifests=[convert.manifest_to_proto(manifest) for manifest in manifests],
            wire_version=WIRE_VERSION,
            newest_plan_version=newest_plan_version,
        )
        with self._translated_errors():
            return rpc.decoded(await self._stub.Register(request, timeout=CALL_TIMEOUT), _lease)

    async def heartbeat(self, node: Node) -> None:
        request = tracker_pb2.HeartbeatRequest(
            node_id=self._node_id,
            incarnation=self._incarnation,
            shards=[convert.shard_to_proto(shard) for shard in node.shards],
            num_sessions=node.num_sessions,
            resident_bytes=node.resident_bytes,
            kv_tokens_free=node.kv_tokens_free,
            probes=[convert.probe_to_proto(probe) for probe in node.probes],
            memory_free_bytes=node.memory_free_bytes,
            workspace_bytes=node.workspace_bytes,
            queue_length=node.queue_length,
            speeds=[convert.speed_to_proto(speed) for speed in node.speeds],
            links=[convert.link_to_proto(link) for link in node.links],
        )
        with self._translated_errors():
            await self._stub.Heartbeat(request, timeout=CALL_TIMEOUT)

    async def report(self, directive: Directive, shards: tuple[Shard, ...], newest_plan_version: int) -> None:
        request = tracker_pb2.ReportDirectiveRequest(
            node_id=self._node_id,
            incarnation=self._incarnation,
            directive_id=directive.directive_id,
            state=convert.DIRECTIVE_STATE[directive.state],
            bytes_done=directive.bytes_done,
            bytes_total=directive.bytes_total,
            failure=directive.failure,
            failure_kind=convert.FAILURE_KIND[directive.failure_kind] if directive.failure_kind else None,
            shards=[convert.shard_to_proto(shard) for shard in shards],
            newest_plan_version=newest_plan_version,
        )
        with self._translated_errors():
            await self._stub.ReportDirective(request, timeout=CALL_TIMEOUT)

    async def leave(self) -> None:
        with self._translated_errors():
            await self._stub.Leave(
                tracker_pb2.LeaveRequest(node_id=self._node_id, incarnation=self._incarnation), timeout=2.0
            )

    async def ping(self, num_bytes: int) -> None:
        """Sends this many bytes for nothing, to see how long it takes."""
        with self._translated_errors():
            await self._stub.Ping(tracker_pb2.PingRequest(payload=bytes(num_bytes)), timeout=CALL_TIMEOUT)

    async def directives(self) -> AsyncIterator[Directive]:
        """Directives for this node until the stream breaks."""
        with self._translated_errors():
            async for message in self._stub.WatchDirectives(
                tracker_pb2.WatchDirectivesRequest(node_id=self._node_id, incarnation=self._incarnation)
            ):
                yield rpc.decoded(message, convert.directive_from_proto)

    async def topologies(self) -> AsyncIterator[Topology]:
        """Topology snapshots until the stream breaks. Raises TopologyGap if an update was missed."""
        topology = Topology()
        with self._translated_errors():
            async for message in self._stub.WatchTopology(tracker_pb2.WatchTopologyRequest()):
                topology = topology.updated(rpc.decoded(message, convert.update_from_proto))
                yield topology

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """The one boundary where errors of gRPC become ours."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        except rpc.Garbled as error:
            raise TrackerUnreachable(f"tracker {self.address} sent what makes no sense: {error}") from error
        except asyncio.CancelledError:
            if rpc.is_being_cancelled():
                raise
            raise TrackerUnreachable(f"tracker {self.address} cancelled the call") from None

    def _error(self, error: grpc.aio.AioRpcError) -> MeshnetError:
        code = rpc.error_code(error)
        if code == Unregistered.code:
            return Unregistered(error.details() or "the tracker does not know this node")
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(error.details() or "the tracker refused the message")
        return TrackerUnreachable(f"tracker {self.address}: {error.code().name}: {error.details()}")


def _lease(answer: tracker_pb2.RegisterResponse) -> Lease:
    refused = {model.model_id: model.reason for model in answer.refused_models}
    return Lease(answer.lease_seconds, answer.heartbeat_seconds, refused)
