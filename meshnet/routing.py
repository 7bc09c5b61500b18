"""Route choice: a pure function of the topology, made where the route is used.

Dijkstra over layer boundaries. A state is "layers `[0, boundary)` have run"; an edge is one hop: a node runs layers
`[boundary, end)`, as far as it can. (Stopping earlier than a node can go never saves a hop, because the next node may
start anywhere inside its range.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection

from meshnet.errors import MissingLayers, UnknownModel
from meshnet.model import LayerRange, merge_layers
from meshnet.topology import Hop, Node, Topology

HopCost = Callable[[Node, LayerRange], float]


# More than any route of nodes that are alive can cost, so that a suspect node is passed only where no other serves.
SUSPECT_COST = 10_000.0
# Work should leave a draining node, but not at the price of another hop.
DRAINING_COST = 0.5


def hop_cost(node: Node, layers: LayerRange) -> float:
    """Nodes that are alive first, then few hops; between equals none that drains, and the one with fewer sessions."""
    cost = 1.0 + min(node.num_sessions, 1000) * 1e-4
    return cost + (0.0 if node.alive else SUSPECT_COST) + (DRAINING_COST if node.draining else 0.0)


def find_route(
    topology: Topology,
    model_id: str,
    entry_node_id: str,
    *,
    avoid: Collection[str] = (),
    cost: HopCost = hop_cost,
) -> tuple[Hop, ...]:
    """The cheapest route of a deployed model that begins at an entry node.

    Nodes in `avoid` are left out. Stub nodes never share a route with real ones. Raises UnknownModel, or
    MissingLayers with the layers that no node on offer serves.
    """
    if model_id not in topology.models:
        known = ", ".join(sorted(topology.models)) or "none"
        raise UnknownModel(f"model {model_id!r} is not deployed; deployed models: {known}")
    entry = topology.nodes.get(entry_node_id)
    nodes = [n for n in topology.nodes.values() if n.node_id not in avoid and entry and n.stub == entry.stub]
    held = {n.node_id: n.layers(model_id) for n in nodes}
    num_layers = topology.models[model_id].manifest.num_layers
    route = _cheapest(nodes, held, num_layers, entry_node_id, cost)
    if route is None:
        raise MissingLayers(model_id, _missing(held, num_layers, entry_node_id))
    return route


def _cheapest(
    nodes: list[Node], held: dict[str, frozenset[int]], num_layers: int, entry_node_id: str, cost: HopCost
) -> tuple[Hop, ...] | None:
    # Ties are broken by the node ids on the way, so that equal snapshots give equal routes everywhere.
    queue: list[tuple[float, tuple[str, ...], int, tuple[Hop, ...]]] = [(0.0, (), 0, ())]
    done: set[int] = set()
    while queue:
        so_far, ids, boundary, hops = heapq.heappop(queue)
        if boundary == num_layers:
            return hops
        if boundary in done:
            continue
        done.add(boundary)
        for node in nodes:
            if boundary not in held[node.node_id] or (boundary == 0 and node.node_id != entry_node_id):
                continue
            layers = LayerRange(boundary, _reach(held[node.node_id], boundary))
            step = so_far + cost(node, layers)
            heapq.heappush(queue, (step, (*ids, node.node_id), layers.end, (*hops, Hop(node.node_id, layers))))
    return None


def _reach(layers: frozenset[int], start: int) -> int:
    end = start
    while end in layers:
        end += 1
    return end


def _missing(held: dict[str, frozenset[int]], num_layers: int, entry_node_id: str) -> tuple[LayerRange, ...]:
    served = set().union(*held.values()) if held else set()
    if 0 not in held.get(entry_node_id, frozenset()):
        served.discard(0)
    return merge_layers(set(range(num_layers)) - served)
