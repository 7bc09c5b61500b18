"""What the tracker must know again after a restart, and the changes of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from meshnet.model import LayerRange
from meshnet.topology import DeployedModel, Node


@dataclass(frozen=True, slots=True, order=True)
class Assignment:
    """Layers of one model that a node holds or was told to load."""

    model_id: str
    layers: LayerRange


Assignments = tuple[Assignment, ...]

MAX_EVICTED = 1000


@dataclass(frozen=True, slots=True)
class Remembered:
    """The state of an earlier run: deployed models by id, models that were undeployed, assignments by node id, nodes
    that were being drained, and incarnations that were evicted, by node id and the oldest first."""

    models: Mapping[str, DeployedModel] = field(default_factory=dict)
    undeployed: frozenset[str] = frozenset()
    nodes: Mapping[str, Assignments] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    evicted: Mapping[str, str] = field(default_factory=dict)


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
    draining: bool = False


@dataclass(frozen=True, slots=True)
class ForgetNode:
    node_id: str


@dataclass(frozen=True, slots=True)
class SaveEvicted:
    """Replaces what was saved of the node's eviction; only the newest `MAX_EVICTED` are kept."""

    node_id: str
    incarnation: str


Save = SaveModel | SaveUndeployed | SaveNode | ForgetNode | SaveEvicted


def subject(save: Save) -> tuple[str, str]:
    """What a change is about. Of two changes with the same subject, only the later one counts."""
    match save:
        case SaveModel(model):
            return "model", model.model_id
        case SaveUndeployed(model_id):
            return "model", model_id
        case SaveNode(node_id) | ForgetNode(node_id):
            return "node", node_id
        case SaveEvicted(node_id):
            return "evicted", node_id


class NodeLog:
    """What has been asked to be saved of nodes, so that only changes are saved again."""

    def __init__(self, remembered: Remembered) -> None:
        self._saved = {
            node_id: SaveNode(node_id, assignments, node_id in remembered.draining)
            for node_id, assignments in remembered.nodes.items()
        }

    def note(self, changed: Iterable[Node]) -> list[Save]:
        """Looks at nodes that have changed; load progress alone is nothing to save."""
        saves: list[Save] = []
        for node in changed:
            save = SaveNode(node.node_id, assignments_of(node), node.draining)
            if self._saved.get(node.node_id) != save:
                self._saved[node.node_id] = save
                saves.append(save)
        return saves

    def forget(self, candidates: Iterable[str] | None, here: Collection[str]) -> list[Save]:
        """Of the candidates (None: of all that are saved) those that are not here."""
        saved = self._saved if candidates is None else [i for i in candidates if i in self._saved]
        gone = sorted(node_id for node_id in saved if node_id not in here)
        for node_id in gone:
            del self._saved[node_id]
        return [ForgetNode(node_id) for node_id in gone]


def assignments_of(node: Node) -> Assignments:
    return tuple(sorted(Assignment(shard.model_id, shard.layers) for shard in node.shards))
