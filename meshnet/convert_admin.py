"""As meshnet.convert, for the messages of the Admin service."""

from __future__ import annotations

import math

from meshnet import convert
from meshnet.admin import DeployWish, Event, EventLevel, NodeDescription, PlanPreview
from meshnet.errors import InvalidRequest
from meshnet.v1 import admin_pb2

EVENT_LEVEL = {
    EventLevel.INFO: admin_pb2.EVENT_LEVEL_INFO,
    EventLevel.WARNING: admin_pb2.EVENT_LEVEL_WARNING,
}


def event_to_proto(event: Event) -> admin_pb2.Event:
    return admin_pb2.Event(
        number=event.number, unix_seconds=event.unix_seconds, level=EVENT_LEVEL[event.level], text=event.text
    )


def event_from_proto(message: admin_pb2.Event) -> Event:
    if not math.isfinite(message.unix_seconds):
        raise InvalidRequest(f"an event cannot be of {message.unix_seconds} s since 1970")
    # A level that is newer than this software matters at least as much as a warning.
    level = next((key for key, value in EVENT_LEVEL.items() if value == message.level), EventLevel.WARNING)
    return Event(message.number, message.unix_seconds, level, message.text)


def description_to_proto(description: NodeDescription) -> admin_pb2.DescribeNodeResponse:
    return admin_pb2.DescribeNodeResponse(
        node=convert.node_to_proto(description.node),
        planned_bytes=description.planned_bytes,
        free_bytes=description.free_bytes,
        believed_bytes=description.believed_bytes,
        directives=[convert.directive_to_proto(directive) for directive in description.directives],
        silent_seconds=description.silent_seconds,
    )


def description_from_proto(message: admin_pb2.DescribeNodeResponse) -> NodeDescription:
    return NodeDescription(
        node=convert.node_from_proto(message.node),
        planned_bytes=message.planned_bytes,
        free_bytes=message.free_bytes,
        believed_bytes=message.believed_bytes if message.HasField("believed_bytes") else None,
        directives=tuple(convert.directive_from_proto(directive) for directive in message.directives),
        silent_seconds=message.silent_seconds,
    )


def preview_to_proto(preview: PlanPreview) -> admin_pb2.GetPlanResponse:
    return admin_pb2.GetPlanResponse(
        directives=[convert.directive_to_proto(directive) for directive in preview.directives],
        shortfalls=preview.shortfalls,
    )


def preview_from_proto(message: admin_pb2.GetPlanResponse) -> PlanPreview:
    return PlanPreview(
        tuple(convert.directive_from_proto(directive) for directive in message.directives), tuple(message.shortfalls)
    )


def wish_to_proto(wish: DeployWish) -> admin_pb2.DeployModelRequest:
    return admin_pb2.DeployModelRequest(
        model_id=wish.model_id,
        kv_tokens=wish.kv_tokens,
        priority=wish.priority,
        context_length=wish.context_length,
        sessions=wish.sessions,
        replicas=wish.replicas,
        kv_precision=convert.KV_PRECISION[wish.kv_precision],
    )
