"""The gRPC service of the tracker for people. It only translates between messages and the mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from meshnet import convert, convert_admin
from meshnet.admin import NodeDescription, PlanPreview
from meshnet.directive import Directive
from meshnet.errors import InvalidRequest, MissingLayers
from meshnet.routing import find_route
from meshnet.rpc import translates_errors, translates_stream_errors
from meshnet.topology import NOT_PROBED, DeployedModel, RouteProbe
from meshnet.v1 import admin_pb2, admin_pb2_grpc, tracker_pb2
from services.tracker.placement import Draft
from services.tracker.tracker import Tracker
from services.tracker.watch import watch_events

Context = Any


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Everything here can be done with grpcurl."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._mesh = tracker.mesh

    @translates_errors
    async def ListNodes(  # noqa: N802
        self, request: admin_pb2.ListNodesRequest, context: Context
    ) -> admin_pb2.ListNodesResponse:
        nodes = self._mesh.topology.nodes
        return admin_pb2.ListNodesResponse(nodes=[convert.node_to_proto(nodes[node_id]) for node_id in sorted(nodes)])

    @translates_errors
    async def ListModels(  # noqa: N802
        self, request: admin_pb2.ListModelsRequest, context: Context
    ) -> admin_pb2.ListModelsResponse:
        known = sorted(self._mesh.registry.manifests.items())
        return admin_pb2.ListModelsResponse(
            models=[
                admin_pb2.KnownModel(
                    manifest=convert.manifest_to_proto(manifest),
                    deployed=model_id in self._mesh.topology.models,
                    node_ids=self._mesh.registry.holders(model_id),
                )
                for model_id, manifest in known
            ]
        )

    @translates_errors
    async def GetCoverage(  # noqa: N802
        self, request: admin_pb2.GetCoverageRequest, context: Context
    ) -> admin_pb2.GetCoverageResponse:
        return admin_pb2.GetCoverageResponse(
            models=[
                convert.coverage_to_proto(self._mesh.topology.coverage(model_id), self._mesh.plan.shortfall(model_id))
                for model_id in self._asked(request.model_id)
            ]
        )

    @translates_errors
    async def ListRoutes(  # noqa: N802
        self, request: admin_pb2.ListRoutesRequest, context: Context
    ) -> admin_pb2.ListRoutesResponse:
        routes = [
            convert.route_to_proto(route)
            for model_id in self._asked(request.model_id)
            for route in self._routes(model_id)
        ]
        return admin_pb2.ListRoutesResponse(routes=routes)

    @translates_errors
    async def DeployModel(  # noqa: N802
        self, request: admin_pb2.DeployModelRequest, context: Context
    ) -> admin_pb2.DeployModelResponse:
        model_id = request.model_id
        effects = self._mesh.deploy(
            model_id,
            request.kv_tokens,
            request.priority,
            self._tracker.now(),
            max_context=request.context_length,
            sessions=request.sessions,
            replicas=request.replicas,
            kv_precision=convert.kv_precision_from_proto(request.kv_precision),
        )
        self._tracker.apply(effects)
        await self._tracker.saver.flush()
        return admin_pb2.DeployModelResponse(
            model=convert.model_to_proto(self._mesh.deployed(model_id)),
            directives=self._told(d for d in effects.directives if d.model_id == model_id),
            shortfall=self._mesh.plan.shortfall(model_id),
        )

    @translates_errors
    async def UndeployModel(  # noqa: N802
        self, request: admin_pb2.UndeployModelRequest, context: Context
    ) -> admin_pb2.UndeployModelResponse:
        self._tracker.apply(self._mesh.undeploy(request.model_id, self._tracker.now()))
        await self._tracker.saver.flush()
        return admin_pb2.UndeployModelResponse()

    @translates_errors
    async def ListDirectives(  # noqa: N802
        self, request: admin_pb2.ListDirectivesRequest, context: Context
    ) -> admin_pb2.ListDirectivesResponse:
        directives = self._mesh.ledger.all(request.node_id or None)
        return admin_pb2.ListDirectivesResponse(directives=self._told(directives))

    @translates_errors
    async def DrainNode(  # noqa: N802
        self, request: admin_pb2.DrainNodeRequest, context: Context
    ) -> admin_pb2.DrainNodeResponse:
        effects = self._mesh.drain(request.node_id, self._tracker.now(), cancel=request.cancel)
        self._tracker.apply(effects)
        answer = admin_pb2.DrainNodeResponse(
            node=convert.node_to_proto(self._mesh.topology.nodes[request.node_id]),
            directives=self._told(effects.directives),
            shortfalls=[shortfall.text for shortfall in self._mesh.plan.shortfalls],
        )
        await self._tracker.saver.flush()
        return answer

    @translates_errors
    async def EvictNode(  # noqa: N802
        self, request: admin_pb2.EvictNodeRequest, context: Context
    ) -> admin_pb2.EvictNodeResponse:
        effects = self._mesh.evict(request.node_id, self._tracker.now())
        self._tracker.apply(effects)
        await self._tracker.saver.flush()
        return admin_pb2.EvictNodeResponse(directives=self._told(effects.directives))

    @translates_errors
    async def DescribeNode(  # noqa: N802
        self, request: admin_pb2.DescribeNodeRequest, context: Context
    ) -> admin_pb2.DescribeNodeResponse:
        node_id = request.node_id
        silent_seconds = self._mesh.registry.silent_seconds(node_id, self._tracker.now())
        node = self._mesh.topology.nodes[node_id]
        planned_bytes, free_bytes, believed_bytes = self._mesh.room(node_id)
        description = NodeDescription(
            node=node,
            planned_bytes=planned_bytes,
            free_bytes=free_bytes,
            believed_bytes=believed_bytes,
            directives=tuple(self._tracker.told(self._mesh.ledger.all(node_id))),
            silent_seconds=silent_seconds,
        )
        return convert_admin.description_to_proto(description)

    @translates_errors
    async def GetPlan(  # noqa: N802
        self, request: admin_pb2.GetPlanRequest, context: Context
    ) -> admin_pb2.GetPlanResponse:
        here = self._mesh.topology.nodes
        if unknown := sorted(set(request.without_node_ids) - here.keys()):
            names = ", ".join(map(repr, unknown))
            raise InvalidRequest(f"no such nodes: {names}; nodes: {', '.join(sorted(here)) or 'none'}")
        deploy = self._wished(request.deploy) if request.HasField("deploy") else None
        plan = self._mesh.preview(request.without_node_ids, deploy, rebalance=request.rebalance)
        directives = tuple(self._as_directive(draft) for draft in plan.drafts)
        shortfalls = tuple(shortfall.text for shortfall in plan.shortfalls)
        return convert_admin.preview_to_proto(PlanPreview(directives, shortfalls))

    @translates_errors
    async def Rebalance(  # noqa: N802
        self, request: admin_pb2.RebalanceRequest, context: Context
    ) -> admin_pb2.RebalanceResponse:
        effects = self._tracker.apply(self._mesh.rebalance(self._tracker.now()))
        return admin_pb2.RebalanceResponse(directives=self._told(effects.directives))

    @translates_stream_errors
    async def WatchEvents(  # noqa: N802
        self, request: admin_pb2.WatchEventsRequest, context: Context
    ) -> AsyncIterator[admin_pb2.Event]:
        tracker = self._tracker
        async for event in watch_events(tracker.changes, tracker.events, request.past, past_only=request.past_only):
            yield convert_admin.event_to_proto(event)

    def _told(self, directives: Iterable[Directive]) -> list[tracker_pb2.Directive]:
        return [convert.directive_to_proto(directive) for directive in self._tracker.told(directives)]

    def _wished(self, request: admin_pb2.DeployModelRequest) -> DeployedModel:
        """Raises UnknownModel or InvalidRequest."""
        return self._mesh.wished(
            request.model_id,
            request.kv_tokens,
            request.priority,
            request.context_length,
            request.sessions,
            request.replicas,
            convert.kv_precision_from_proto(request.kv_precision),
        )

    def _as_directive(self, draft: Draft) -> Directive:
        """As it would be issued, with the weight bytes that it would load or free."""
        manifest = self._mesh.registry.manifests.get(draft.model_id)
        return Directive(
            directive_id="",
            node_id=draft.node_id,
            kind=draft.kind,
            model_id=draft.model_id,
            layers=draft.layers,
            plan_version=0,
            reason=draft.reason,
            quantization=draft.quantization,
            revision=draft.revision,
            kv_tokens=draft.kv_tokens,
            kv_precision=draft.kv_precision,
            bytes_total=manifest.weight_bytes(draft.layers, draft.quantization) if manifest else 0,
        )

    def _asked(self, model_id: str) -> list[str]:
        """The one model, or all deployed ones. Raises UnknownModel."""
        return [self._mesh.deployed(model_id).model_id] if model_id else sorted(self._mesh.topology.models)

    def _routes(self, model_id: str) -> list[RouteProbe]:
        topology = self._mesh.topology
        known = {probe.hops[0].node_id: probe for probe in topology.probes(model_id)}
        routes = []
        for entry in topology.entry_nodes(model_id):
            try:
                hops = find_route(topology, model_id, entry.node_id)
                routes.append(known.get(entry.node_id) or RouteProbe(model_id, hops, NOT_PROBED))
            except MissingLayers:
                continue  # Only complete routes are listed; GetCoverage says what is missing.
        return routes
