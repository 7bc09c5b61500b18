"""Which entry node a generation goes to."""

from __future__ import annotations

from collections.abc import Collection

from meshnet.errors import MissingLayers, RouteNotReady, UnknownModel
from meshnet.routing import find_route
from meshnet.topology import DeployedModel, Node, Topology


def deployed_model(topology: Topology, model_id: str) -> DeployedModel:
    """Raises UnknownModel, with the models that there are."""
    model = topology.models.get(model_id)
    if model is None:
        known = ", ".join(sorted(topology.models)) or "none"
        raise UnknownModel(f"The model {model_id!r} does not exist. Models of this mesh: {known}.")
    return model


def pick_entry(topology: Topology, model_id: str, turn: int, avoid: Collection[str] = ()) -> Node | None:
    """The entry node with a ready route and the fewest sessions; between equals they take turns. A suspect or draining
    one only if there is no other.

    None if `avoid` leaves no entry node to try. Raises UnknownModel, MissingLayers if the model has no whole route, or
    RouteNotReady if no token has come through one.
    """
    deployed_model(topology, model_id)
    routed = [node for node in topology.entry_nodes(model_id) if _has_route(topology, model_id, node)]
    if not routed:
        raise MissingLayers(model_id, topology.coverage(model_id).missing)
    ready = {probe.hops[0].node_id for probe in topology.probes(model_id) if probe.ready}
    proven = [node for node in routed if node.node_id in ready]
    if not proven:
        raise RouteNotReady(model_id, why_not_ready(topology, model_id))
    offered = [node for node in proven if node.node_id not in avoid]
    alive = [node for node in offered if node.alive] or offered
    allowed = [node for node in alive if not node.draining] or alive
    fewest = min((node.num_sessions for node in allowed), default=0)
    equals = [node for node in allowed if node.num_sessions == fewest]
    return equals[turn % len(equals)] if equals else None


def why_not_ready(topology: Topology, model_id: str) -> str:
    """What keeps a deployed model from answering, for people; empty if one of its routes is ready."""
    probes = topology.probes(model_id)
    if any(probe.ready for probe in probes):
        return ""
    if missing := topology.coverage(model_id).missing:
        return f"layers {', '.join(map(str, missing))} are not served"
    told = [f"entry node {probe.hops[0].node_id}: {probe.failure}" for probe in probes]
    return "; ".join(told) or "no token has come through a route yet"


def _has_route(topology: Topology, model_id: str, entry: Node) -> bool:
    try:
        find_route(topology, model_id, entry.node_id)
    except MissingLayers:
        return False
    return True
