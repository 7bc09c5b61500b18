"""What failed directives have taught about nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from meshnet.directive import Directive, DirectiveKind
from meshnet.topology import DeployedModel, Node
from services.tracker.placement import Policy, believed_bytes


class Beliefs:
    """`refused`: bytes that a node can hold at most. `stuck`: (node id, model id) whose drops have failed."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        self.stuck: set[tuple[str, str]] = set()

    def forget(self, node_id: str) -> None:
        self.refused.pop(node_id, None)
        self.stuck = {(held_by, model_id) for held_by, model_id in self.stuck if held_by != node_id}

    def learn(
        self,
        failed: Directive,
        node: Node,
        models: Iterable[DeployedModel],
        open_directives: Iterable[Directive],
        policy: Policy,
    ) -> int | None:
        """Bytes that the node is now believed to hold, if the failure tells something about that."""
        if failed.kind is DirectiveKind.DROP_SHARD:
            self.stuck.add((node.node_id, failed.model_id))
            return None
        if node.layers(failed.model_id).issuperset(failed.layers.layers):
            return None  # It was loaded already; that says nothing about memory.
        believed = believed_bytes(node, models, open_directives, failed, policy)
        self.refused[node.node_id] = min(believed, self.refused.get(node.node_id, believed))
        return self.refused[node.node_id]
