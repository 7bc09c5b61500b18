"""The snapshots that others see, made anew only where a node has changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshnet.topology import DeployedModel, Node, Topology
from services.tracker.effects import Note
from services.tracker.news import CoverageNews
from services.tracker.remembered import NodeLog, Remembered, Save


class Publisher:
    """`topology` is the last snapshot. Those before it stay as they were; all share what has not changed."""

    def __init__(self, first_version: int, models: Mapping[str, DeployedModel], remembered: Remembered) -> None:
        self.topology = Topology(first_version, models=dict(models))
        self._news = CoverageNews()
        self._news.set_models(models, ())
        self._node_log = NodeLog(remembered)

    def publish(self, changed: Mapping[str, Node | None], models: Mapping[str, DeployedModel]) -> bool:
        """Takes over nodes as they are now (None: gone). Returns whether this makes a new snapshot."""
        before = self.topology
        differing = {i: node for i, node in changed.items() if before.nodes.get(i) != node}
        if not differing and before.models == models:
            return False
        nodes = dict(before.nodes)
        for node_id, node in differing.items():
            if node is None:
                del nodes[node_id]
            else:
                nodes[node_id] = node
            self._news.changed(before.nodes.get(node_id), node)
        if before.models != models:
            self._news.set_models(models, nodes.values())
        self.topology = Topology(before.version + 1, nodes, dict(models))
        return True

    def news(self) -> list[Note]:
        """Which models have become covered or uncovered since the last time."""
        return self._news.take()

    def saves(self, changed: Iterable[str]) -> list[Save]:
        """What must be saved of these nodes."""
        nodes = self.topology.nodes
        return self._node_log.note(nodes[node_id] for node_id in changed if node_id in nodes)

    def forgets(self, gone: Iterable[str] | None) -> list[Save]:
        """What must be saved of these nodes if they are gone; None: of all that are saved and not here."""
        return self._node_log.forget(gone, self.topology.nodes)
