"""The tracker's Admin service, for the command line."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import typer

from meshnet import convert, convert_admin, rpc
from meshnet.admin import DeployWish, Event, NodeDescription, PlanPreview
from meshnet.directive import Directive
from meshnet.errors import MeshnetError
from meshnet.model import ModelManifest
from meshnet.security.shared_secret import SharedSecret
from meshnet.topology import NOT_PROBED, DeployedModel, Node, RouteProbe, Topology
from meshnet.v1 import admin_pb2, admin_pb2_grpc, tracker_pb2, tracker_pb2_grpc
from meshnet.wire import WIRE_VERSION

CALL_TIMEOUT = 5.0


class AdminClient:
    """Blocking calls to a tracker. Each raises grpc.RpcError."""

    def __init__(self, address: str, secret: SharedSecret | None = None) -> None:
        self.address = address
        self._channel = rpc.blocking_channel(address, secret)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._tracker = tracker_pb2_grpc.TrackerStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def topology(self) -> Topology:
        message = self._tracker.GetTopology(tracker_pb2.GetTopologyRequest(), timeout=CALL_TIMEOUT)
        return convert.topology_from_proto(message)

    def manifests(self) -> dict[str, ModelManifest]:
        """Of all models that the mesh knows, deployed or not, by id."""
        answer = self._admin.ListModels(admin_pb2.ListModelsRequest(), timeout=CALL_TIMEOUT)
        manifests = (convert.manifest_from_proto(known.manifest) for known in answer.models)
        return {manifest.model_id: manifest for manifest in manifests}

    def register(self, node: Node, manifests: Sequence[ModelManifest]) -> None:
        """As the node itself would. It is lost again when its lease runs out."""
        request = tracker_pb2.RegisterRequest(
            node=convert.node_to_proto(node),
            incarnation=uuid.uuid4().hex,
            manifests=[convert.manifest_to_proto(manifest) for manifest in manifests],
            wire_version=WIRE_VERSION,
        )
        self._tracker.Register(request, timeout=CALL_TIMEOUT)

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

    def deploy(self, wish: DeployWish) -> tuple[DeployedModel, str]:
        """The model as deployed, and what could not be placed."""
        answer = self._admin.DeployModel(convert_admin.wish_to_proto(wish), timeout=CALL_TIMEOUT)
        return convert.model_from_proto(answer.model), answer.shortfall

    def undeploy(self, model_id: str) -> None:
        self._admin.UndeployModel(admin_pb2.UndeployModelRequest(model_id=model_id), timeout=CALL_TIMEOUT)

    def drain(self, node_id: str, cancel: bool) -> list[str]:
        """What has no place in the mesh."""
        request = admin_pb2.DrainNodeRequest(node_id=node_id, cancel=cancel)
        return list(self._admin.DrainNode(request, timeout=CALL_TIMEOUT).shortfalls)

    def evict(self, node_id: str) -> None:
        self._admin.EvictNode(admin_pb2.EvictNodeRequest(node_id=node_id), timeout=CALL_TIMEOUT)

    def describe(self, node_id: str) -> NodeDescription:
        answer = self._admin.DescribeNode(admin_pb2.DescribeNodeRequest(node_id=node_id), timeout=CALL_TIMEOUT)
        return convert_admin.description_from_proto(answer)

    def directives(self, node_id: str) -> list[Directive]:
        """Of one node, or of all if the id is empty; oldest first."""
        answer = self._admin.ListDirectives(admin_pb2.ListDirectivesRequest(node_id=node_id), timeout=CALL_TIMEOUT)
        return [convert.directive_from_proto(directive) for directive in answer.directives]

    def plan(
        self, without: Sequence[str] = (), deploy: DeployWish | None = None, *, rebalance: bool = False
    ) -> PlanPreview:
        """What would be ordered. Changes nothing."""
        request = admin_pb2.GetPlanRequest(
            without_node_ids=without,
            deploy=convert_admin.wish_to_proto(deploy) if deploy else None,
            rebalance=rebalance,
        )
        return convert_admin.preview_from_proto(self._admin.GetPlan(request, timeout=CALL_TIMEOUT))

    def rebalance(self) -> list[Directive]:
        answer = self._admin.Rebalance(admin_pb2.RebalanceRequest(), timeout=CALL_TIMEOUT)
        return [convert.directive_from_proto(directive) for directive in answer.directives]

    def events(self, past: int, *, past_only: bool) -> Iterator[Event]:
        """The newest `past` events, then new ones as they happen, until the tracker stops."""
        request = admin_pb2.WatchEventsRequest(past=past, past_only=past_only)
        timeout = CALL_TIMEOUT if past_only else None
        for event in self._admin.WatchEvents(request, timeout=timeout):
            yield convert_admin.event_from_proto(event)


@contextmanager
def admin_client(address: str, secret: SharedSecret | None = None) -> Iterator[AdminClient]:
    """A client for one command: a failed call ends the command with one clear line."""
    client = AdminClient(address, secret)
    try:
        yield client
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            typer.echo(f"no tracker answers at {address}: is it running, and is --tracker right?", err=True)
        else:
            typer.echo(f"the tracker at {address} says: {error.details()}", err=True)
        raise typer.Exit(1) from None
    except MeshnetError as error:
        typer.echo(f"the tracker at {address} says what this meshnet does not understand: {error}", err=True)
        raise typer.Exit(1) from None
    except ValueError as error:
        # A number that no field of a message has room for.
        typer.echo(f"the tracker cannot be asked this: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        client.close()
