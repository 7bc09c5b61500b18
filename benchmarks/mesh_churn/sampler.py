"""Looks at the mesh now and then, with the real router."""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.mesh_churn.hardware import described
from benchmarks.mesh_churn.sim_node import SimNode
from benchmarks.mesh_churn.tally import Route, Sample
from benchmarks.mesh_churn.world import World
from meshnet.routing import find_route
from meshnet.topology import Hop, Topology

SAMPLE_SECONDS = 60.0
ROUTES_SECONDS = 1200.0
ENTRIES = 3


def watch(world: World, sample_seconds: float = SAMPLE_SECONDS, routes_seconds: float = ROUTES_SECONDS) -> None:
    """Arranges for samples in the tally of the world."""
    rng = random.Random(world.trace.seed)
    world.clock.every(sample_seconds, lambda: world.tally.samples.append(sample(world)))
    world.clock.every(routes_seconds, lambda: world.tally.routes.extend(routes(world, rng)))


def sample(world: World) -> Sample:
    truth, tally = world.truth, world.tally
    covered = [model_id for model_id in world.catalogue if truth.covered(model_id)]
    bottlenecks = {model_id: truth.bottleneck(model_id) for model_id in world.catalogue}
    means = {i: sum(truth.rates[i]) / len(truth.rates[i]) for i in covered}
    nodes = world.nodes.values()
    return Sample(
        at=world.clock.now,
        num_nodes=len(world.nodes),
        covered_share=len(covered) / len(world.catalogue),
        bottlenecks=bottlenecks,
        evenness=sum(bottlenecks[i] / means[i] for i in covered) / max(1, len(covered)),
        room_used=sum(n.used_bytes(world.catalogue) for n in nodes) / max(1, sum(n.spec.vram_bytes for n in nodes)),
        loaded_bytes=tally.loaded_bytes,
        lost_bytes=tally.lost_bytes,
    )


def routes(world: World, rng: random.Random) -> Iterator[Route]:
    """Of each covered model, from a few entry nodes. The router sees what is true, and only the model's holders."""
    for model_id, sizes in world.catalogue.items():
        if not world.truth.covered(model_id):
            continue
        holders = {node.node_id: node for node in world.nodes.values() if model_id in node.held}
        nodes = {i: described(node.spec, world.catalogue, node.shards(world.catalogue)) for i, node in holders.items()}
        topology = Topology(1, nodes, {model_id: sizes.model})
        entries = sorted(i for i, node in holders.items() if 0 in node.held[model_id])
        for entry in rng.sample(entries, min(ENTRIES, len(entries))):
            hops = find_route(topology, model_id, entry)
            yield Route(model_id, len(hops), min(_rate(world, model_id, holders[hop.node_id], hop) for hop in hops))


def _rate(world: World, model_id: str, node: SimNode, hop: Hop) -> float:
    held, sizes = node.held[model_id], world.catalogue[model_id]
    return 1 / sum(node.spec.layer_seconds(sizes, held[layer]) for layer in hop.layers.layers)
