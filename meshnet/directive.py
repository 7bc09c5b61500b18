"""Rebalance directives: what the tracker orders and how a node acknowledges it.

The life of a directive, as a table (`TRANSITIONS`)::

    PENDING ──> ACCEPTED ──> LOADING ──> READY     LOAD_SHARD
       │           │            └──────> FAILED
       │           └───────────────────> DROPPED   DROP_SHARD
       └───────────────────────────────> FAILED    refused, or the node is gone

LOADING may be reported again and again, with more bytes done each time. A final state never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from meshnet.errors import InvalidRequest
from meshnet.model import KvPrecision, LayerRange, Quantization


class DirectiveKind(StrEnum):
    LOAD_SHARD = "LOAD_SHARD"
    DROP_SHARD = "DROP_SHARD"


class DirectiveState(StrEnum):
    PENDING = "PENDING"
    ACCEPTED = "ACCEPTED"
    LOADING = "LOADING"
    READY = "READY"
    DROPPED = "DROPPED"
    FAILED = "FAILED"

    @property
    def is_final(self) -> bool:
        return not any(source is self for _, source in TRANSITIONS)


class FailureKind(StrEnum):
    """What a directive failed of. Only `NO_ROOM` and `OTHER` tell something about the node's memory."""

    NO_ROOM = "NO_ROOM"
    STALE_PLAN = "STALE_PLAN"
    BAD_FILES = "BAD_FILES"
    NO_ANSWER = "NO_ANSWER"
    OTHER = "OTHER"
    NO_SOURCE = "NO_SOURCE"


_S = DirectiveState
_LOAD = DirectiveKind.LOAD_SHARD
_DROP = DirectiveKind.DROP_SHARD

TRANSITIONS: dict[tuple[DirectiveKind, DirectiveState], frozenset[DirectiveState]] = {
    (_LOAD, _S.PENDING): frozenset({_S.ACCEPTED, _S.LOADING, _S.READY, _S.FAILED}),
    (_LOAD, _S.ACCEPTED): frozenset({_S.LOADING, _S.READY, _S.FAILED}),
    (_LOAD, _S.LOADING): frozenset({_S.LOADING, _S.READY, _S.FAILED}),
    (_DROP, _S.PENDING): frozenset({_S.ACCEPTED, _S.DROPPED, _S.FAILED}),
    (_DROP, _S.ACCEPTED): frozenset({_S.DROPPED, _S.FAILED}),
}


@dataclass(frozen=True, slots=True)
class Directive:
    """One order to one node. Byte counts are of weights; `kv_tokens` is KV cache room, in tokens, and `kv_precision`
    how it is stored.

    `issued_unix_seconds` is for people, who are told it by the tracker; None: not known.
    """

    directive_id: str
    node_id: str
    kind: DirectiveKind
    model_id: str
    layers: LayerRange
    plan_version: int
    reason: str
    quantization: Quantization = Quantization.BFLOAT16
    revision: str = ""
    kv_tokens: int = 0
    state: DirectiveState = DirectiveState.PENDING
    bytes_done: int = 0
    bytes_total: int = 0
    failure: str = ""
    failure_kind: FailureKind | None = None
    issued_unix_seconds: float | None = None
    kv_precision: KvPrecision = KvPrecision.BFLOAT16

    def advance(
        self,
        state: DirectiveState,
        *,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
        failure: str = "",
        failure_kind: FailureKind | None = None,
    ) -> Directive:
        """The directive in its next state. Raises InvalidRequest, and changes nothing, if the table forbids it."""
        if state not in TRANSITIONS.get((self.kind, self.state), frozenset()):
            raise InvalidRequest(f"directive {self.directive_id} ({self.kind}) cannot go from {self.state} to {state}")
        return replace(
            self,
            state=state,
            bytes_done=self.bytes_done if bytes_done is None else bytes_done,
            bytes_total=self.bytes_total if bytes_total is None else bytes_total,
            failure=failure,
            failure_kind=(failure_kind or FailureKind.OTHER) if state is DirectiveState.FAILED else None,
        )
