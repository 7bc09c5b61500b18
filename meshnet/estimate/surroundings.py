"""Where the numbers of an estimate come from: SPECs of machines, or what the nodes of a mesh have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshnet.errors import InvalidRequest
from meshnet.estimate.hardware import Hardware, measured_hardware
from meshnet.estimate.mesh import Surroundings
from meshnet.estimate.pipeline import Way
from meshnet.estimate.spec import NodeSpec, machines_of
from meshnet.hop_cost import DEFAULT_BYTES_PER_SECOND, DEFAULT_RTT_SECONDS
from meshnet.model import ModelManifest
from meshnet.topology import Link, Node, Speed, Topology

# What TCP over Ethernet leaves of a link's rate: 1448 of 1538 bytes.
PAYLOAD_SHARE = 0.94


def surroundings_of_specs(specs: Sequence[NodeSpec]) -> Surroundings:
    """Raises InvalidRequest for SPECs that contradict each other."""
    by_id = {spec.node_id: spec for spec in specs}

    def way(sender: str, receiver: str) -> Way:
        one, other = by_id[sender], by_id[receiver]
        if one.machine_id == other.machine_id:
            return Way()
        rate = PAYLOAD_SHARE * min(one.link_bytes_per_second, other.link_bytes_per_second)
        return Way((one.delay_seconds + other.delay_seconds) / 2, rate)

    return Surroundings(
        hardware={spec.node_id: spec.hardware for spec in specs},
        way=way,
        machine_of={spec.node_id: spec.machine_id for spec in specs},
        machines=machines_of(specs),
    )


def node_of_spec(spec: NodeSpec, manifest: ModelManifest, *, is_first: bool) -> Node:
    """As it would register with a tracker. The first has the model's files, the others fetch what they serve."""
    preferred, *fallbacks = spec.quantizations
    return Node(
        node_id=spec.node_id,
        forward_address="127.0.0.1:1",
        grpc_address="127.0.0.1:1",
        vram_bytes=spec.memory_bytes,
        quantization=preferred,
        fallbacks=tuple(fallbacks),
        available_models=frozenset({manifest.model_id}) if is_first else frozenset(),
        tracker_node=is_first,
        fetches=True,
        site=spec.machine_id,
        speeds=tuple(spec.hardware.speed(manifest, quantization) for quantization in spec.quantizations),
        links=(Link("", 2 * spec.delay_seconds, PAYLOAD_SHARE * spec.link_bytes_per_second),),
    )


def surroundings_of_mesh(topology: Topology, model_id: str, manifests: Mapping[str, ModelManifest]) -> Surroundings:
    """By what nodes have measured of this model; else of another of which there is a manifest. A node that has measured
    nothing is taken for the slowest of those that have. Raises InvalidRequest if none has."""
    measured = {
        node_id: found
        for node_id, node in topology.nodes.items()
        if (found := _hardware(node, model_id, manifests)) is not None
    }
    if not measured:
        raise InvalidRequest("no node of this mesh has measured its speed yet: describe the machines with --node")
    slowest = min(measured.values(), key=lambda hardware: hardware.bytes_per_second)
    return Surroundings(
        hardware={node_id: measured.get(node_id, slowest) for node_id in topology.nodes},
        way=lambda sender, receiver: _measured_way(topology.nodes[sender], topology.nodes[receiver]),
    )


def _hardware(node: Node, model_id: str, manifests: Mapping[str, ModelManifest]) -> Hardware | None:
    def rank(speed: Speed) -> tuple[bool, bool]:
        return speed.model_id == model_id, speed.quantization is node.quantization

    known = [speed for speed in node.speeds if speed.model_id in manifests]
    best = max(known, key=rank, default=None)
    return measured_hardware(best, manifests[best.model_id]) if best else None


def _measured_way(one: Node, other: Node) -> Way:
    """As one of the two has measured it; else half of either's way to the tracker."""
    link = _link(one, other.node_id) or _link(other, one.node_id)
    ends = [_link(node, "") for node in (one, other)]
    rates = [end.bytes_per_second for end in ends if end and end.bytes_per_second]
    slower = min(rates, default=DEFAULT_BYTES_PER_SECOND)
    if link:
        return Way(link.rtt_seconds / 2, link.bytes_per_second or slower)
    round_trips = [end.rtt_seconds if end else DEFAULT_RTT_SECONDS for end in ends]
    return Way(sum(round_trips) / 4, slower)


def _link(node: Node, to: str) -> Link | None:
    return next((link for link in node.links if link.node_id == to), None)
