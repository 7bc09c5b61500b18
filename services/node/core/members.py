"""Who is in the mesh, by all that the tracker tells: who is gone, and who has only to come back. Pure; times in s.

A tracker that was restarted knows at first only the nodes that have registered again. The others, known from before,
count as suspect members until they are back or a lease has passed: sessions run on while the tracker is away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshnet.topology import Node, Topology


@dataclass(frozen=True, slots=True)
class LostNode:
    """A node of which nothing more comes. `how` it went, as the end of a sentence about it."""

    node_id: str
    how: str


class Members:
    """`topology` is the latest snapshot, with the nodes that have yet to come back."""

    def __init__(self) -> None:
        self.topology = Topology()
        self._latest = Topology()
        self._awaited: dict[str, Node] = {}
        self._awaited_until = 0.0

    def reconnected(self, now: float, lease_seconds: float) -> None:
        """The tracker begins to tell everything anew."""
        self._awaited = {node_id: replace(node, alive=False) for node_id, node in self.topology.nodes.items()}
        self._awaited_until = now + lease_seconds
        self._latest = replace(self._latest, nodes={})

    def update(self, topology: Topology, now: float) -> tuple[LostNode, ...]:
        """Takes a snapshot over. Returns the nodes that are gone by it."""
        self._latest = topology
        return self.expire(now)

    def expire(self, now: float) -> tuple[LostNode, ...]:
        """Gives up the nodes that should have been back by now. Returns the nodes that are gone."""
        awaited = self._awaited if now < self._awaited_until else {}
        self._awaited = {node_id: node for node_id, node in awaited.items() if node_id not in self._latest.nodes}
        before, topology = self.topology, self._latest
        if self._awaited:
            topology = replace(topology, nodes={**topology.nodes, **self._awaited})
        self.topology = topology
        return tuple(
            LostNode(node_id, how)
            for node_id, node in before.nodes.items()
            if (how := _how_lost(node, topology.nodes.get(node_id)))
        )


def _how_lost(before: Node, now: Node | None) -> str:
    """Empty if it is still here."""
    if now is None:
        return "left the mesh" if before.alive else "was lost"
    return "" if now.forward_address == before.forward_address else "was restarted"
