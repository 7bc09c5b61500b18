"""A node that only talks: it speaks the tracker's gRPC and says that it loads what it is told to load."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from meshnet import convert
from meshnet.directive import Directive, DirectiveKind, DirectiveState
from meshnet.model import ModelManifest
from meshnet.topology import Node
from meshnet.v1 import tracker_pb2, tracker_pb2_grpc
from meshnet.wire import WIRE_VERSION
from services.tracker.view import settled

CALL_SECONDS = 10.0


class FakeNode:
    def __init__(self, channel: grpc.aio.Channel, node: Node, manifests: Sequence[ModelManifest]) -> None:
        self.stub: Any = tracker_pb2_grpc.TrackerStub(channel)
        self.node = node
        self.manifests = manifests
        self.incarnation = uuid.uuid4().hex

    @property
    def ids(self) -> dict[str, Any]:
        return {"node_id": self.node.node_id, "incarnation": self.incarnation}

    async def register(self, wire_version: int = WIRE_VERSION) -> tracker_pb2.RegisterResponse:
        request = tracker_pb2.RegisterRequest(
            node=convert.node_to_proto(self.node),
            incarnation=self.incarnation,
            manifests=[convert.manifest_to_proto(manifest) for manifest in self.manifests],
            wire_version=wire_version,
        )
        answer: tracker_pb2.RegisterResponse = await self.stub.Register(request, timeout=CALL_SECONDS)
        return answer

    async def heartbeat(self) -> None:
        shards = [convert.shard_to_proto(shard) for shard in self.node.shards]
        await self.stub.Heartbeat(tracker_pb2.HeartbeatRequest(**self.ids, shards=shards), timeout=CALL_SECONDS)

    async def leave(self) -> None:
        await self.stub.Leave(tracker_pb2.LeaveRequest(**self.ids), timeout=CALL_SECONDS)

    async def directives(self) -> AsyncIterator[Directive]:
        async for message in self.stub.WatchDirectives(tracker_pb2.WatchDirectivesRequest(**self.ids)):
            yield convert.directive_from_proto(message)

    async def report(self, directive: Directive, state: DirectiveState) -> Directive:
        directive = directive.advance(state)
        self.node = replace(self.node, shards=settled(self.node.shards, directive))
        request = tracker_pb2.ReportDirectiveRequest(
            **self.ids,
            directive_id=directive.directive_id,
            state=convert.DIRECTIVE_STATE[state],
            shards=[convert.shard_to_proto(shard) for shard in self.node.shards],
        )
        await self.stub.ReportDirective(request, timeout=CALL_SECONDS)
        return directive

    async def obey(self, directive: Directive) -> None:
        """All states that a directive goes through when all goes well."""
        directive = await self.report(directive, DirectiveState.ACCEPTED)
        if directive.kind is DirectiveKind.LOAD_SHARD:
            directive = await self.report(directive, DirectiveState.LOADING)
            await self.report(directive, DirectiveState.READY)
        else:
            await self.report(directive, DirectiveState.DROPPED)
