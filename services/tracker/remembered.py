"""What the tracker must know again after a restart, and the changes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshnet.model import LayerRange
from meshnet.topology import DeployedModel, Node


@dataclass(frozen=True, slots=True, order=True)
class Assignment:
    """Layers of one model that a node holds or was told to load."""

    model_id: str
    layers: LayerRange


Assignments = tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class Remembered:
    """The state of an earlier run: deployed models by id, models that were undeployed, assignments by node id."""

    models: Mapping[str, DeployedModel] = field(default_factory=dict)
    undeployed: frozenset[str] = frozenset()
    nodes: Mapping[str, Assignments] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveModel:
    model: DeployedModel


@dataclass(frozen=True, slots=True)
class SaveUndeployed:
    model_id: str


@dataclass(frozen=True, slots=True)
class SaveNode:
    """Replaces what was saved of the node."""

    node_id: str
    assignments: Assignments


@dataclass(frozen=True, slots=True)
class ForgetNode:
    node_id: str


Save = SaveModel | SaveUndeployed | SaveNode | ForgetNode


def subject(save: Save) -> tuple[str, str]:
    """What a change is about. Of two changes with the same subject, only the later one counts."""
    match save:
        case SaveModel(model):
            return "model", model.model_id
        case SaveUndeployed(model_id):
            return "model", model_id
        case SaveNode(node_id, _) | ForgetNode(node_id):
            return "node", node_id


class AssignmentLog:
    """Which assignments have been asked to be saved, so that only changes are saved again."""

    def __init__(self, nodes: Mapping[str, Assignments]) -> None:
        self._saved = dict(nodes)

    def note(self, before: Mapping[str, Node], after: Mapping[str, Node]) -> list[Save]:
        """Looks at the nodes that differ between two snapshots; load progress alone is no change."""
        saves: list[Save] = []
        for node_id, node in after.items():
            if node == before.get(node_id):
                continue
            assignments = assignments_of(node)
            if self._saved.get(node_id) != assignments:
                self._saved[node_id] = assignments
                saves.append(SaveNode(node_id, assignments))
        return saves

    def forget_all_but(self, nodes: Mapping[str, Node]) -> list[Save]:
        gone = sorted(self._saved.keys() - nodes.keys())
        for node_id in gone:
            del self._saved[node_id]
        return [ForgetNode(node_id) for node_id in gone]


def assignments_of(node: Node) -> Assignments:
    return tuple(sorted(Assignment(shard.model_id, shard.layers) for shard in node.shards))
