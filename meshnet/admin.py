"""What the tracker tells people: nodes in detail, plans that nobody has carried out, and events."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshnet.directive import Directive
from meshnet.model import KvPrecision
from meshnet.topology import Node


class EventLevel(StrEnum):
    """`WARNING`: somebody may have to act."""

    INFO = "info"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Numbers grow by one; a gap means that a watcher was too slow for some."""

    number: int
    unix_seconds: float
    level: EventLevel
    text: str


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """One node. `planned_bytes`: what its shards take or will take when the open directives are done. `free_bytes`:
    what the planner may still give it. `believed_bytes`: what it is believed to hold at most; None: no load has failed.
    `directives`: oldest first. `silent_seconds`: since the node was last heard of."""

    node: Node
    planned_bytes: int
    free_bytes: int
    believed_bytes: int | None
    directives: tuple[Directive, ...]
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class PlanPreview:
    """Directives without ids that would be issued, and what would have no place."""

    directives: tuple[Directive, ...]
    shortfalls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeployWish:
    """A model as somebody wants it deployed. Zeros leave the choice to the tracker: `kv_tokens` as many as `sessions`
    (0: one) of `context_length` take (0: what the model was made for), `replicas` as many as there is room for."""

    model_id: str
    kv_tokens: int = 0
    priority: int = 0
    context_length: int = 0
    sessions: int = 0
    replicas: int = 0
    kv_precision: KvPrecision = KvPrecision.BFLOAT16
