"""Who is here: nodes, their leases, and the models whose files they have. Pure; `now` is monotonic, in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from meshnet.addresses import WILDCARD_HOSTS, split_address
from meshnet.errors import InvalidRequest, Unregistered
from meshnet.model import KvPrecision, ModelManifest, Quantization
from meshnet.topology import Link, Node, RouteProbe, Shard, Speed, check_node_id
from services.tracker.offers import Offers
from services.tracker.remembered import MAX_EVICTED

# Sums of such sizes stay far inside the unsigned 64 bits of the wire.
MAX_LAYERS = 4096
MAX_MODEL_BYTES = 2**50
MAX_SHARDS = 4096
MAX_FAILURE_CHARS = 2000
MAX_REVISION_CHARS = 256
MAX_MEASUREMENTS = 1000


@dataclass(slots=True)
class Member:
    """A node within its lease, last heard of at `heard_at`. `node.available_models` holds what it has files of,
    whatever the revision; `node.alive` is false while the node is suspect."""

    node: Node
    incarnation: str
    manifests: dict[str, ModelManifest]
    heard_at: float
    superseded: deque[str] = field(default_factory=lambda: deque(maxlen=16))


@dataclass(frozen=True, slots=True)
class Registered:
    """How a registration went. `restarted`: it replaced another incarnation. `other_revisions`: models whose files
    the node has at another revision than the mesh serves; they do not count as available on it."""

    is_new: bool
    restarted: bool
    other_revisions: tuple[str, ...]


class Registry:
    """A node is suspect after `suspect_seconds` of silence, and lost after `lease_seconds`.

    `evicted`: incarnations to refuse, by node id, the oldest first.

    `changed`: nodes of which anything has changed, or that came or went, since somebody last cleared it.
    """

    def __init__(
        self, lease_seconds: float, suspect_seconds: float, evicted: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.lease_seconds = lease_seconds
        self.suspect_seconds = suspect_seconds
        self._members: dict[str, Member] = {}
        self._offers = Offers()
        self._evicted = dict(evicted)
        self.draining: set[str] = set()
        self.changed: set[str] = set()

    @property
    def manifests(self) -> dict[str, ModelManifest]:
        """The models that the mesh knows, each at the one revision that it serves."""
        return self._offers.manifests

    def pin(self, manifest: ModelManifest) -> None:
        """Keeps this revision of a model, whatever the nodes that come and go have."""
        self._revisions_changed(self._offers.pin(manifest))

    def unpin(self, model_id: str) -> None:
        self._revisions_changed(self._offers.unpin(model_id))

    def register(self, node: Node, incarnation: str, manifests: Sequence[ModelManifest], now: float) -> Registered:
        """Adds the node, or replaces its older self. What it reports to hold is taken over.

        Raises InvalidRequest for a description that makes no sense, Unregistered for an incarnation that another has
        already replaced.
        """
        by_id = {manifest.model_id: manifest for manifest in manifests}
        _check_node(node, incarnation)
        for manifest in manifests:
            _check_manifest(manifest)
        _check_shards(node, node.shards, by_id)
        check_probes(node.node_id, node.probes)
        check_measurements(node.node_id, node.speeds, node.links)
        old = self._members.get(node.node_id)
        if self._evicted.get(node.node_id) == incarnation:
            raise InvalidRequest(f"node {node.node_id} was evicted from this mesh: start it again to let it back in")
        if old and incarnation in old.superseded:
            raise Unregistered(f"node {node.node_id} has been replaced by a newer process with the same id")
        node = replace(node, available_models=frozenset(by_id), alive=True)
        member = Member(node, incarnation, by_id, now)
        restarted = old is not None and old.incarnation != incarnation
        if old is not None:
            member.superseded.extend(old.superseded)
            if restarted:
                member.superseded.append(old.incarnation)
        self._members[node.node_id] = member
        self.changed.add(node.node_id)
        self._revisions_changed(self._offers.put(node.node_id, by_id))
        others = sorted(m.model_id for m in manifests if not self._offers.is_served(m))
        return Registered(old is None, restarted, tuple(others))

    def member(self, node_id: str, incarnation: str) -> Member:
        """Raises Unregistered if the node is not here, or is here as another process."""
        member = self._members.get(node_id)
        if member is None:
            raise Unregistered(f"node {node_id!r} is not registered, or its lease ran out: register again")
        if member.incarnation != incarnation:
            raise Unregistered(f"node {node_id} is registered as another process: register again")
        return member

    def renew(self, member: Member, now: float) -> bool:
        """The node was heard of. Returns whether it was suspect until now."""
        was_suspect = not member.node.alive
        member.heard_at = now
        if was_suspect:
            self.set_node(member, replace(member.node, alive=True))
        return was_suspect

    def set_node(self, member: Member, node: Node) -> None:
        """Takes over what the node says of itself now."""
        if node != member.node:
            member.node = node
            self.changed.add(node.node_id)

    def set_shards(self, member: Member, shards: Sequence[Shard]) -> None:
        """Raises InvalidRequest, and changes nothing, for shards that the node cannot have."""
        self.check_shards(member, shards)
        self.set_node(member, replace(member.node, shards=tuple(shards)))

    def check_shards(self, member: Member, shards: Sequence[Shard]) -> None:
        """Raises InvalidRequest for shards that the node cannot have."""
        _check_shards(member.node, shards, member.manifests)

    def leave(self, node_id: str, incarnation: str) -> None:
        self.member(node_id, incarnation)
        self._remove(node_id)

    def evict(self, node_id: str) -> str:
        """Forgets the node, and refuses its incarnation, which it returns, from now on. Raises Unregistered."""
        incarnation = self._here(node_id).incarnation
        self._evicted.pop(node_id, None)
        self._evicted[node_id] = incarnation
        if len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]
        self._remove(node_id)
        return incarnation

    def set_draining(self, node_id: str, draining: bool) -> None:
        """Raises Unregistered."""
        self._here(node_id)
        self.changed.add(node_id)
        self.draining = self.draining | {node_id} if draining else self.draining - {node_id}

    def expire(self, now: float) -> list[str]:
        """Forgets the nodes that were not heard from for a lease, and returns their ids."""
        lost = sorted(
            node_id for node_id, member in self._members.items() if member.heard_at + self.lease_seconds <= now
        )
        for node_id in lost:
            self._remove(node_id)
        return lost

    def suspect(self, now: float) -> list[str]:
        """Marks the nodes whose heartbeats are overdue, and returns the ids of those that were not marked before."""
        overdue = [m for m in self._members.values() if m.node.alive and m.heard_at + self.suspect_seconds <= now]
        for member in overdue:
            self.set_node(member, replace(member.node, alive=False))
        return sorted(member.node.node_id for member in overdue)

    def extend_leases(self, now: float) -> None:
        """For a tracker that was itself away: nobody could have been heard."""
        for member in self._members.values():
            member.heard_at = max(member.heard_at, now)

    def node(self, node_id: str) -> Node | None:
        """None if it is not here. `available_models` are those of which it has the revision that the mesh serves."""
        member = self._members.get(node_id)
        return self._as_available(member) if member else None

    def nodes(self) -> dict[str, Node]:
        """By id, each as `node` gives it."""
        return {node_id: self._as_available(member) for node_id, member in sorted(self._members.items())}

    def silent_seconds(self, node_id: str, now: float) -> float:
        """Since the node was last heard of. Raises Unregistered."""
        return max(0.0, now - self._here(node_id).heard_at)

    def is_served(self, manifest: ModelManifest) -> bool:
        """Whether this is the revision of its model that the mesh serves."""
        return self._offers.is_served(manifest)

    def holders(self, model_id: str) -> tuple[str, ...]:
        """Nodes that have the model's files at the revision that the mesh serves, by id."""
        return self._offers.holders(model_id)

    def _revisions_changed(self, model_ids: set[str]) -> None:
        """The mesh knows these models at another revision now: that matters to who has files or layers of them."""
        if not model_ids:
            return
        for node_id, member in self._members.items():
            held = {shard.model_id for shard in member.node.shards}
            if not model_ids.isdisjoint(member.manifests.keys() | held):
                self.changed.add(node_id)

    def _remove(self, node_id: str) -> None:
        del self._members[node_id]
        self.changed.add(node_id)
        self._revisions_changed(self._offers.remove(node_id))

    def _here(self, node_id: str) -> Member:
        if node_id not in self._members:
            here = ", ".join(sorted(self._members)) or "none"
            raise Unregistered(f"node {node_id!r} is not registered; nodes: {here}")
        return self._members[node_id]

    def _as_available(self, member: Member) -> Node:
        same = frozenset(m.model_id for m in member.manifests.values() if self._offers.is_served(m))
        draining = member.node.node_id in self.draining
        if same == member.node.available_models and draining == member.node.draining:
            return member.node
        return replace(member.node, available_models=same, draining=draining)


def _check_node(node: Node, incarnation: str) -> None:
    check_node_id(node.node_id)
    if not incarnation:
        raise InvalidRequest(f"node {node.node_id}: the incarnation is empty; draw one at every start")
    for name, address in (("forward", node.forward_address), ("gRPC", node.grpc_address)):
        host, port = split_address(address)
        if host in WILDCARD_HOSTS or port == 0 or not all(c.isalnum() or c in ".-_:%" for c in host):
            raise InvalidRequest(
                f"node {node.node_id}: {name} address {address!r} is not one that others can reach; advertise HOST:PORT"
            )


def _check_manifest(manifest: ModelManifest) -> None:
    name = f"the manifest of model {manifest.model_id!r}"
    if not manifest.revision:
        raise InvalidRequest(f"{name} has no revision")
    if manifest.num_layers > MAX_LAYERS:
        raise InvalidRequest(f"{name} has {manifest.num_layers} layers, over the limit of {MAX_LAYERS}")
    heaviest = max(manifest.weight_bytes(manifest.all_layers, quantization) for quantization in Quantization)
    caches = (manifest.kv_bytes(manifest.context_length, Quantization.BFLOAT16, kv) for kv in KvPrecision)
    if max(heaviest, *caches) > MAX_MODEL_BYTES:
        raise InvalidRequest(f"{name} has sizes over the limit of {MAX_MODEL_BYTES} bytes")


def _check_shards(node: Node, shards: Iterable[Shard], manifests: dict[str, ModelManifest]) -> None:
    shards, node_id = tuple(shards), node.node_id
    if len(shards) > MAX_SHARDS:
        raise InvalidRequest(f"node {node_id} reports {len(shards)} shards, over the limit of {MAX_SHARDS}")
    fetched = []
    for shard in shards:
        if max(shard.bytes_done, shard.bytes_total) > MAX_MODEL_BYTES:
            raise InvalidRequest(f"node {node_id} reports a shard over the limit of {MAX_MODEL_BYTES} bytes")
        manifest = manifests.get(shard.model_id)
        if node.fetches and (manifest is None or shard.revision not in ("", manifest.revision)):
            fetched.append(shard)
        elif manifest is None:
            raise InvalidRequest(f"node {node_id} reports a shard of {shard.model_id!r} but no manifest of that model")
        elif shard.layers.end > manifest.num_layers:
            raise InvalidRequest(
                f"node {node_id} reports layers {shard.layers} of {shard.model_id}, which has {manifest.num_layers}"
            )
    _check_fetched(node_id, fetched)


def _check_fetched(node_id: str, shards: Sequence[Shard]) -> None:
    """No manifest of the node's own says what these are of: any may be, of a reasonable size."""
    if sum(len(shard.layers) for shard in shards) > MAX_LAYERS or any(s.layers.end > MAX_LAYERS for s in shards):
        raise InvalidRequest(f"node {node_id} reports fetched layers over the limit of {MAX_LAYERS}")
    if any(len(shard.revision) > MAX_REVISION_CHARS for shard in shards):
        raise InvalidRequest(f"node {node_id} reports a revision of over {MAX_REVISION_CHARS} characters")


def check_probes(node_id: str, probes: Sequence[RouteProbe]) -> None:
    """Raises InvalidRequest for probes that the node cannot have made."""
    if len({probe.model_id for probe in probes}) < len(probes):
        raise InvalidRequest(f"node {node_id} reports more than one probe of a model")
    for probe in probes:
        if not 0 < len(probe.hops) <= MAX_LAYERS or probe.hops[0].node_id != node_id:
            raise InvalidRequest(f"node {node_id} reports a probe of {probe.model_id} that does not begin there")
        if len(probe.failure) > MAX_FAILURE_CHARS:
            raise InvalidRequest(f"node {node_id} reports a failure of over {MAX_FAILURE_CHARS} characters")


def check_measurements(node_id: str, speeds: Sequence[Speed], links: Sequence[Link]) -> None:
    """Raises InvalidRequest for more measurements than a node can have made."""
    if max(len(speeds), len(links)) > MAX_MEASUREMENTS:
        raise InvalidRequest(f"node {node_id} reports over {MAX_MEASUREMENTS} measurements of a kind")
