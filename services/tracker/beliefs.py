"""What failed directives have taught about nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from meshnet.directive import Directive, DirectiveKind, FailureKind
from meshnet.sizes import format_size


@dataclass(slots=True)
class Belief:
    """About one node. `refused`: bytes that it can hold at most. `stuck`: models whose drops have failed; `damaged`:
    models whose files it cannot load; `sourceless`: models whose weights it could fetch from nobody."""

    refused: int | None = None
    stuck: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    sourceless: set[str] = field(default_factory=set)

    @property
    def barred(self) -> frozenset[str]:
        """Models that it gets no layers of."""
        return frozenset(self.damaged | self.sourceless)

    def learn(self, failed: Directive, held_bytes: int, believed_bytes: int) -> str:
        """What is believed from now on, for people; empty if the failure tells nothing.

        `held_bytes` are what the node holds, `believed_bytes` what it may hold at most after a load had no room.
        """
        if failed.kind is DirectiveKind.DROP_SHARD:
            self.stuck.add(failed.model_id)
            return f"cannot drop {failed.model_id}"
        match failed.failure_kind:
            case FailureKind.STALE_PLAN:
                return ""
            case FailureKind.BAD_FILES:
                self.damaged.add(failed.model_id)
                return f"cannot load {failed.model_id}"
            case FailureKind.NO_SOURCE:
                self.sourceless.add(failed.model_id)
                return f"cannot fetch {failed.model_id}, until a node that has its files registers"
            case FailureKind.NO_ANSWER:
                return self._refuse(held_bytes)
            case _:
                return self._refuse(believed_bytes)

    def _refuse(self, size: int) -> str:
        self.refused = size if self.refused is None else min(size, self.refused)
        return f"holds {format_size(self.refused)} at most"


class Beliefs:
    """By node id, for those nodes about which something is believed."""

    def __init__(self) -> None:
        self._beliefs: dict[str, Belief] = {}

    def of(self, node_id: str) -> Belief:
        return self._beliefs.get(node_id) or Belief()

    def to_change(self, node_id: str) -> Belief:
        return self._beliefs.setdefault(node_id, Belief())

    def may_fetch(self, model_ids: Collection[str]) -> set[str]:
        """Somebody may have these models now. Returns the nodes that could not fetch them until then."""
        changed = {i for i, belief in self._beliefs.items() if not belief.sourceless.isdisjoint(model_ids)}
        for node_id in changed:
            self._beliefs[node_id].sourceless.difference_update(model_ids)
        return changed

    def forget(self, node_id: str) -> None:
        self._beliefs.pop(node_id, None)
