"""The tracker's Admin service, for the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import typer

from meshnet import convert, rpc
from meshnet.topology import NOT_PROBED, DeployedModel, RouteProbe, Topology
from meshnet.v1 import admin_pb2, admin_pb2_grpc, tracker_pb2, tracker_pb2_grpc

CALL_TIMEOUT = 5.0


class AdminClient:
    """Blocking calls to a tracker. Each raises grpc.RpcError."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=list(rpc.CHANNEL_OPTIONS))
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._tracker = tracker_pb2_grpc.TrackerStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def topology(self) -> Topology:
        message = self._tracker.GetTopology(tracker_pb2.GetTopologyRequest(), timeout=CALL_TIMEOUT)
        return convert.topology_from_proto(message)

    def shortfalls(self) -> dict[str, str]:
        """By model: what could not be placed, for those where something could not."""
        answer = self._admin.GetCoverage(admin_pb2.GetCoverageRequest(), timeout=CALL_TIMEOUT)
        return {model.model_id: model.shortfall for model in answer.models if model.shortfall}

    def routes(self) -> list[RouteProbe]:
        """The route that each entry node would use now, by model."""
        answer = self._admin.ListRoutes(admin_pb2.ListRoutesRequest(), timeout=CALL_TIMEOUT)
        return [
            RouteProbe(
                route.model_id,
                tuple(convert.hop_from_proto(hop) for hop in route.hops),
                # What is not ready has a failure; "ready" is told by its absence.
                "" if route.ready else route.failure or NOT_PROBED,
                route.latency_seconds if route.HasField("latency_seconds") else None,
            )
            for route in answer.routes
        ]

    def deploy(self, model_id: str, kv_tokens: int, priority: int) -> tuple[DeployedModel, str]:
        """The model as deployed, and what could not be placed."""
        request = admin_pb2.DeployModelRequest(model_id=model_id, kv_tokens=kv_tokens, priority=priority)
        answer = self._admin.DeployModel(request, timeout=CALL_TIMEOUT)
        return convert.model_from_proto(answer.model), answer.shortfall

    def undeploy(self, model_id: str) -> None:
        self._admin.UndeployModel(admin_pb2.UndeployModelRequest(model_id=model_id), timeout=CALL_TIMEOUT)

    def drain(self, node_id: str, cancel: bool) -> list[str]:
        """What has no place in the mesh."""
        request = admin_pb2.DrainNodeRequest(node_id=node_id, cancel=cancel)
        return list(self._admin.DrainNode(request, timeout=CALL_TIMEOUT).shortfalls)

    def evict(self, node_id: str) -> None:
        self._admin.EvictNode(admin_pb2.EvictNodeRequest(node_id=node_id), timeout=CALL_TIMEOUT)


@contextmanager
def admin_client(address: str) -> Iterator[AdminClient]:
    """A client for one command: a failed call ends the command with one clear line."""
    client = AdminClient(address)
    try:
        yield client
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            typer.echo(f"no tracker answers at {address}: is it running, and is --tracker right?", err=True)
        else:
            typer.echo(f"the tracker at {address} says: {error.details()}", err=True)
        raise typer.Exit(1) from None
    finally:
        client.close()
