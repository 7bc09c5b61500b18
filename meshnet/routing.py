"""Route choice: a pure function of the topology, made where the route is used. Costs are in `meshnet.hop_cost`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from meshnet.errors import MissingLayers, UnknownModel
from meshnet.hop_cost import DRAINING_SECONDS, NO_WISH, HopCosts, Wish
from meshnet.model import LayerRange, merge_layers
from meshnet.route_search import Layout, RouteSearch, Run
from meshnet.topology import Hop, Node, ShardState, Topology

Route = tuple[Hop, ...]


def find_route(
    topology: Topology,
    model_id: str,
    entry_node_id: str,
    *,
    avoid: Collection[str] = (),
    wish: Wish = NO_WISH,
) -> Route:
    """The cheapest route of a deployed model that begins at an entry node.

    Nodes in `avoid` are left out. Stub nodes never share a route with real ones. A draining node is passed only where
    that saves a hop. Raises UnknownModel, or MissingLayers with the layers that no node on offer serves.
    """
    costs = partial(HopCosts, topology, model_id, wish)
    search = _prepare(topology, model_id, entry_node_id, avoid)
    return _past_draining(topology, lambda penalty: search(costs(draining_seconds=penalty)))


def find_routes(
    topology: Topology, model_id: str, entry_node_id: str, *, limit: int, spread: int | None = None
) -> tuple[Route, ...]:
    """Up to `limit` routes that together pass as many of the model's nodes as may be, the cheapest first.

    What nodes have to do now plays no part, so that the routes of a mesh stay the same under any load. Each route after
    the first passes a node that serves and that none before it passes. Raises what `find_route` raises.
    """
    search = _prepare(topology, model_id, entry_node_id, ())
    costs = partial(HopCosts, topology, model_id, Wish(spread), idle=True)
    routes = [_past_draining(topology, lambda penalty: search(costs(draining_seconds=penalty)))]
    passed = {hop.node_id for hop in routes[0]}
    while len(routes) < limit:
        route = search(costs(draining_seconds=DRAINING_SECONDS, shunned=passed))
        new = {hop.node_id for hop in route} - passed
        if not any(topology.nodes[node_id].alive and not topology.nodes[node_id].draining for node_id in new):
            break
        routes.append(route)
        passed |= new
    return tuple(routes)


def choose_route(topology: Topology, model_id: str, routes: Sequence[Route], wish: Wish = NO_WISH) -> Route | None:
    """The cheapest of some routes, as `find_route` would choose; None of none. All their nodes must be here."""

    def choose(draining_seconds: float) -> Route:
        costs = HopCosts(topology, model_id, wish, draining_seconds=draining_seconds)
        return min(routes, key=costs.route_seconds)

    return _past_draining(topology, choose) if routes else None


def missing_layers(topology: Topology, model_id: str, entry: Node) -> tuple[LayerRange, ...]:
    """The layers that no route from this entry node can have, as the fewest ranges; none: it has a route."""
    return _missing(_runs(topology, model_id, entry, ()), topology, model_id, entry.node_id)


def _prepare(
    topology: Topology, model_id: str, entry_node_id: str, avoid: Collection[str]
) -> Callable[[HopCosts], Route]:
    """The search of one entry node's cheapest route, for any costs. Raises what `find_route` raises."""
    if model_id not in topology.models:
        known = ", ".join(sorted(topology.models)) or "none"
        raise UnknownModel(f"model {model_id!r} is not deployed; deployed models: {known}")
    entry = topology.nodes.get(entry_node_id)
    runs = _runs(topology, model_id, entry, avoid) if entry else []
    if missing := _missing(runs, topology, model_id, entry_node_id):
        raise MissingLayers(model_id, missing)
    layout = Layout(runs, topology.models[model_id].manifest.num_layers)
    return lambda costs: RouteSearch(layout, entry_node_id, costs).route()


def _past_draining(topology: Topology, choose: Callable[[float], Route]) -> Route:
    """What is chosen when passing a draining node costs nothing, or with a penalty for it if that takes no more hops:
    work should leave a draining node, but not at the price of another hop."""
    route = choose(0.0)
    if not any(topology.nodes[hop.node_id].draining for hop in route):
        return route
    around = choose(DRAINING_SECONDS)
    return around if len(around) <= len(route) else route


def _runs(topology: Topology, model_id: str, entry: Node, avoid: Collection[str]) -> list[Run]:
    """The runs of layers that nodes of the entry node's kind serve, by node id."""
    return [
        Run(node, layers.start, layers.end)
        for node_id, node in sorted(topology.nodes.items())
        if node.stub == entry.stub and node_id not in avoid
        for layers in _served(node, model_id)
    ]


def _served(node: Node, model_id: str) -> tuple[LayerRange, ...]:
    ready = [s.layers for s in node.shards if s.model_id == model_id and s.state is ShardState.READY]
    return tuple(ready) if len(ready) < 2 else merge_layers(node.layers(model_id))


def _missing(runs: list[Run], topology: Topology, model_id: str, entry_node_id: str) -> tuple[LayerRange, ...]:
    if not any(run.start == 0 and run.node.node_id == entry_node_id for run in runs):
        runs = [Run(run.node, max(run.start, 1), run.end) for run in runs]
    missing, reached = [], 0
    for start, end in sorted((run.start, run.end) for run in runs):
        if reached < start < end:
            missing.append(LayerRange(reached, start))
        reached = max(reached, end)
    num_layers = topology.models[model_id].manifest.num_layers
    return tuple([*missing, LayerRange(reached, num_layers)] if reached < num_layers else missing)
