"""What a hop costs, in seconds of one decode step: a pure function of what nodes say of themselves.

A step of one token through a route takes, summed over its hops,

- the link to the node: a round trip, since the answer comes back the same way, and the bytes of one position there and
  back. As one of the two measured it; else an end of each: half its round trip to the tracker, and the bytes at the
  rate of its own link; else defaults,
- `HOP_SECONDS`, for what a frame costs whatever is in it,
- the frames that wait there, each as long as the node takes for its layers,
- the layers, at the measured speed of decoding (not measured: the median of the mesh, else a default), and slower by
  `SESSION_SHARE` for each session that shares the steps.

Penalties come on top. They are far above any time, so that they order the routes before time does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from meshnet.model import LayerRange, Quantization
from meshnet.topology import Hop, Link, Node, ShardState, Topology

HOP_SECONDS = 0.001
DEFAULT_RTT_SECONDS = 0.02
DEFAULT_BYTES_PER_SECOND = 12.5e6
DEFAULT_LAYER_SECONDS = 0.001
# A step of 16 sessions was measured to take one and a half times as long as a step of one.
SESSION_SHARE = 0.03
# What a spread route costs at most more than the cheapest: replicas that differ by less share the sessions.
SPREAD = 0.05
BYTES_PER_ELEMENT = 2

# A suspect node is passed only where no other serves, one without KV room only where all others are suspect or full.
SUSPECT_SECONDS = 1e7
KV_SHORT_SECONDS = 1e6
DRAINING_SECONDS = 1e5
SHUNNED_SECONDS = 1e4


@dataclass(frozen=True, slots=True)
class Wish:
    """What a session asks of its route.

    `spread` (any number, such as a hash of the session's id) makes each node up to `SPREAD` dearer than it is, each
    number other nodes; None: no node. `extra_load`: sessions on nodes beyond those that the topology shows.
    `kv_tokens`: what the session needs room for.
    """

    spread: int | None = None
    extra_load: Mapping[str, int] = field(default_factory=dict)
    kv_tokens: int = 0


NO_WISH = Wish()


class HopCosts:
    """Costs of hops of one model in one snapshot.

    `shunned` nodes are passed only where no other serves. `idle`: as if no node had anything
    to do. `draining_seconds` is the penalty for passing a draining node.
    """

    def __init__(
        self,
        topology: Topology,
        model_id: str,
        wish: Wish = NO_WISH,
        *,
        shunned: Collection[str] = (),
        idle: bool = False,
        draining_seconds: float = 0.0,
    ) -> None:
        self._nodes = topology.nodes
        self._model_id = model_id
        self._frame_bytes = topology.models[model_id].manifest.hidden_size * BYTES_PER_ELEMENT
        self._layer_seconds = _typical_layer_seconds(topology.nodes.values(), model_id)
        self._wish = wish
        self._shunned = frozenset(shunned)
        self._idle = idle
        self._draining_seconds = draining_seconds
        self._factors: dict[str, float] = {}

    def layer_seconds(self, node: Node) -> float:
        """Seconds that the node takes for one layer: the mean of its layers, if they differ."""
        sessions = 0 if self._idle else min(node.num_sessions + self._wish.extra_load.get(node.node_id, 0), 1000)
        return self._dearer(node, self._alone_seconds(node) * (1 + SESSION_SHARE * sessions))

    def entering_seconds(self, node: Node, link_seconds: float) -> float:
        """What it costs to pass the node at all, over a link from where the frame is."""
        queue = 0.0 if self._idle or not node.queue_length else self._queue_seconds(node)
        return self._dearer(node, HOP_SECONDS + link_seconds + queue) + self._penalty(node)

    def link_end_seconds(self, node: Node) -> float:
        """The node's end of a link that nobody has measured."""
        to_tracker = next((link for link in node.links if not link.node_id), None)
        rtt = DEFAULT_RTT_SECONDS if to_tracker is None else to_tracker.rtt_seconds
        return rtt / 2 + self._frame_bytes / (_rate(to_tracker) or DEFAULT_BYTES_PER_SECOND)

    def measured_link_seconds(self, link: Link, one: Node, other: Node) -> float:
        """A link that one of its ends has measured."""
        rate = _rate(link) or min(_rate(_link(node, "")) or DEFAULT_BYTES_PER_SECOND for node in (one, other))
        return link.rtt_seconds + 2 * self._frame_bytes / rate

    def link_seconds(self, sender: Node, receiver: Node) -> float:
        link = _link(sender, receiver.node_id) or _link(receiver, sender.node_id)
        if link is None:
            return self.link_end_seconds(sender) + self.link_end_seconds(receiver)
        return self.measured_link_seconds(link, sender, receiver)

    def hop_seconds(self, before: Node | None, node: Node, num_layers: int) -> float:
        """A hop after another; `before` None: where the session begins."""
        link = 0.0 if before is None else self.link_seconds(before, node)
        return self.entering_seconds(node, link) + num_layers * self.layer_seconds(node)

    def route_seconds(self, route: Iterable[Hop]) -> float:
        """The whole route. Raises KeyError if a node is not in the topology."""
        total, before = 0.0, None
        for hop in route:
            node = self._nodes[hop.node_id]
            total += self.hop_seconds(before, node, len(hop.layers))
            before = node
        return total

    def _alone_seconds(self, node: Node) -> float:
        seconds, num_layers = 0.0, 0
        for layers, quantization in _ready(node, self._model_id):
            speed = _decode_speed(node, self._model_id, quantization)
            typical = self._layer_seconds.get(quantization) or self._layer_seconds.get(None, DEFAULT_LAYER_SECONDS)
            seconds += len(layers) * (1 / speed if speed else typical)
            num_layers += len(layers)
        return seconds / num_layers if num_layers else DEFAULT_LAYER_SECONDS

    def _queue_seconds(self, node: Node) -> float:
        num_layers = sum(len(layers) for layers, _ in _ready(node, self._model_id))
        return node.queue_length * num_layers * self._alone_seconds(node)

    def _penalty(self, node: Node) -> float:
        penalty = 0.0 if node.alive else SUSPECT_SECONDS
        if node.kv_tokens_free < self._wish.kv_tokens:
            penalty += KV_SHORT_SECONDS
        if node.draining:
            penalty += self._draining_seconds
        if node.node_id in self._shunned:
            penalty += SHUNNED_SECONDS
        return penalty

    def _dearer(self, node: Node, seconds: float) -> float:
        if self._wish.spread is None:
            return seconds
        factor = self._factors.get(node.node_id)
        if factor is None:
            factor = self._factors[node.node_id] = 1 + SPREAD * _share(self._wish.spread, node.node_id)
        return seconds * factor


def _share(spread: int, node_id: str) -> float:
    """At least 0 and below 1, as if drawn, and always the same."""
    digest = hashlib.blake2b(b"%d/%s" % (spread, node_id.encode()), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def _ready(node: Node, model_id: str) -> list[tuple[LayerRange, Quantization]]:
    return [(s.layers, s.quantization) for s in node.shards if s.model_id == model_id and s.state is ShardState.READY]


def _link(node: Node, to: str) -> Link | None:
    return next((link for link in node.links if link.node_id == to), None)


def _rate(link: Link | None) -> float | None:
    return link.bytes_per_second if link else None


def _decode_speed(node: Node, model_id: str, quantization: Quantization) -> float | None:
    for speed in node.speeds:
        if speed.model_id == model_id and speed.quantization is quantization:
            return speed.decode_tokens_per_second or None
    return None


def _typical_layer_seconds(nodes: Iterable[Node], model_id: str) -> dict[Quantization | None, float]:
    """The medians of what was measured of a model; under None of all its quantizations together."""
    measured: dict[Quantization | None, list[float]] = {}
    for node in nodes:
        for speed in node.speeds:
            if speed.model_id == model_id and speed.decode_tokens_per_second > 0:
                for key in (speed.quantization, None):
                    measured.setdefault(key, []).append(1 / speed.decode_tokens_per_second)
    return {key: median(values) for key, values in measured.items()}
