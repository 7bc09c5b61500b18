"""Which entry node a generation goes to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from meshnet.errors import MissingLayers, RouteNotReady, UnknownModel
from meshnet.routing import missing_layers
from meshnet.topology import DeployedModel, Node, Topology

NO_CALLS: Mapping[str, int] = MappingProxyType({})


def deployed_model(topology: Topology, model_id: str) -> DeployedModel:
    """Raises UnknownModel, with the models that there are."""
    model = topology.models.get(model_id)
    if model is None:
        known = ", ".join(sorted(topology.models)) or "none"
        raise UnknownModel(f"The model {model_id!r} does not exist. Models of this mesh: {known}.")
    return model


def pick_entry(
    topology: Topology, model_id: str, turn: int, avoid: Collection[str] = (), calls: Mapping[str, int] = NO_CALLS
) -> Node | None:
    """The entry node with a ready route and the least to do; between equals they take turns. A suspect or draining one
    only if there is no other.

    What a node has to do: its sessions, as its heartbeats tell, or the frames that wait there if these are more (one of
    each session may just have been waiting), and the `calls` that the caller has under way to it, of which they may not
    tell yet.

    None if `avoid` leaves no entry node to try. Raises UnknownModel, MissingLayers if the model has no whole route, or
    RouteNotReady if no token has come through one.
    """
    deployed_model(topology, model_id)
    routed = _with_route(topology, model_id)
    if not routed:
        raise MissingLayers(model_id, topology.coverage(model_id).missing)
    ready = {probe.hops[0].node_id for probe in topology.probes(model_id) if probe.ready}
    proven = [node for node in routed if node.node_id in ready]
    if not proven:
        told = {probe.hops[0].node_id for probe in topology.probes(model_id)}
        is_known = all(node.node_id in told for node in routed)
        raise RouteNotReady(model_id, why_not_ready(topology, model_id), is_known=is_known)
    offered = [node for node in proven if node.node_id not in avoid]
    alive = [node for node in offered if node.alive] or offered
    allowed = [node for node in alive if not node.draining] or alive
    load = {node.node_id: max(node.num_sessions, node.queue_length) + calls.get(node.node_id, 0) for node in allowed}
    least = min(load.values(), default=0)
    equals = [node for node in allowed if load[node.node_id] == least]
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


def _with_route(topology: Topology, model_id: str) -> list[Node]:
    """Entry nodes from which nodes of their kind serve every layer."""
    entries = topology.entry_nodes(model_id)
    # What is missing is the same from every entry node of a kind.
    first = {node.stub: node for node in reversed(entries)}
    whole = {stub for stub, node in first.items() if not missing_layers(topology, model_id, node)}
    return [node for node in entries if node.stub in whole]
