"""The memory of a node, layer by layer, as it will be when its open directives are done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from meshnet.directive import Directive, DirectiveKind
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Node, Shard, ShardState
from services.tracker.placement.costs import Costs
from services.tracker.placement.types import Policy
from services.tracker.revisions import is_of_revision


@dataclass(frozen=True, slots=True)
class Known:
    """All that the planner is told of a node: what it reports, its open directives in the order of issue, and what
    failures have taught: bytes that it can hold at most (`refused`), models that it cannot drop (`stuck`), models that
    it cannot load (`barred`)."""

    node: Node
    directives: tuple[Directive, ...] = ()
    refused: int | None = None
    stuck: frozenset[str] = frozenset()
    barred: frozenset[str] = frozenset()


class Account:
    """One node. A node runs its directives in order, so an open DROP frees room for a LOAD issued after it.

    `held`: bytes by model and layer of all that the node holds or will hold of the deployed models. `foreign`: the same
    of anything else, which no route passes: other models, other revisions. `ready`: layers by model that serve now and
    that no open directive drops. `capacity` is in bytes, workspace included. A `closed` node gets nothing new and makes
    no room. A suspect one keeps what it holds until it is heard again or lost; of a draining one, what others serve is
    dropped.
    """

    def __init__(self, known: Known, policy: Policy, workspace_bytes: int = 0) -> None:
        node = known.node
        self.node = node
        self.node_id = node.node_id
        self.closed = node.draining or not node.alive
        # A stub has no weights to fetch.
        self.fetches = node.fetches and not node.stub
        self.stuck = known.stuck
        self.barred = known.barred
        self.capacity = node.vram_bytes if known.refused is None else min(node.vram_bytes, known.refused)
        self.held: dict[str, dict[int, int]] = {}
        self.foreign: dict[str, dict[int, int]] = {}
        self.ready: dict[str, set[int]] = {}
        # What was measured is of the shards held now; those to come may take as much as is usual, or as is predicted.
        self._workspace = max(policy.workspace_bytes, node.workspace_bytes or 0, workspace_bytes)
        self.used = self._workspace
        self._coming = 0

    @property
    def shard_bytes(self) -> int:
        """Bytes of what it holds or will hold, without the workspace."""
        return self.used - self._workspace

    @property
    def free(self) -> int:
        """Bytes to give; negative if the node holds more than it should."""
        free = self.capacity - self.used
        if self.node.memory_free_bytes is not None:
            free = min(free, self.node.memory_free_bytes - self._coming)
        return min(0, free) if self.closed else free

    def layers(self, model_id: str) -> Collection[int]:
        return self.held.get(model_id, {}).keys()

    def has_files(self, model_id: str) -> bool:
        """Whether it has the model's whole files, at the revision that the mesh serves."""
        return model_id in self.node.available_models

    def take(self, model_id: str, sizes: Mapping[int, int], *, coming: bool, foreign: bool = False) -> None:
        """Books layers, `coming` if their memory is not taken yet, `foreign` if they are of no deployed model."""
        held = (self.foreign if foreign else self.held).setdefault(model_id, {})
        for layer, size in sizes.items():
            more = max(0, size - held.get(layer, 0))
            held[layer] = held.get(layer, 0) + more
            self.used += more
            self._coming += more if coming else 0

    def load(self, costs: Costs, layers: LayerRange, quantization: Quantization) -> None:
        sizes = costs.sizes(quantization)
        self.take(costs.model_id, {i: sizes[i + 1] - sizes[i] for i in layers.layers}, coming=True)

    def drop(self, model_id: str, layers: Iterable[int]) -> None:
        layers = tuple(layers)
        for holdings in (self.held, self.foreign):
            held = holdings.get(model_id, {})
            for layer in layers:
                size = held.pop(layer, 0)
                self.used -= size
                self._coming -= size
            if not held:
                holdings.pop(model_id, None)
        self.ready.get(model_id, set()).difference_update(layers)

    def stage_work(self, costs: Costs) -> int:
        """Bytes of weights that a decode step reads of all layers of the model that it holds."""
        work = costs.work(self.node.quantization)
        return sum(work[layer + 1] - work[layer] for layer in self.layers(costs.model_id))


def open_account(known: Known, models: Mapping[str, Costs], policy: Policy) -> Account:
    """The account of a node. `models` are the deployed ones."""
    account = Account(known, policy, _predicted_workspace(known.node, models))
    for shard in known.node.shards:
        _book_shard(account, shard, _served(known.node, shard, models))
    for directive in known.directives:
        _book_directive(account, directive, _served(known.node, directive, models))
    return account


def _predicted_workspace(node: Node, models: Mapping[str, Costs]) -> int:
    """Bytes of the largest step of any model that the node may be given. A stub's takes none."""
    within_reach = models.keys() if node.fetches else models.keys() & node.available_models
    sizes = (models[model_id].workspace(node.quantizations) for model_id in within_reach)
    return 0 if node.stub else max(sizes, default=0)


def believed_bytes(known: Known, models: Mapping[str, Costs], failed: Directive, policy: Policy) -> int:
    """What to believe of a node's memory once a LOAD_SHARD failed there: what it holds, and half of what it refused.

    Half, not one byte less: a load that can never work is given up after a few tries instead of one a layer.
    """
    account = open_account(known, models, policy)
    costs = models.get(failed.model_id)
    if costs is None:
        return account.capacity
    held, sizes = account.layers(failed.model_id), costs.sizes(failed.quantization)
    wanted = (sizes[i + 1] - sizes[i] for i in failed.layers.layers if i not in held)
    return min(account.capacity, account.used + sum(wanted) // 2)


def _served(node: Node, what: Shard | Directive, models: Mapping[str, Costs]) -> Costs | None:
    """The deployed model that these layers are of; None for a model or revision that the mesh does not serve."""
    costs = models.get(what.model_id)
    if costs is None or what.layers.end > costs.num_layers:
        return None
    served = costs.model.manifest.revision
    return costs if is_of_revision(node, what.model_id, what.revision, served) else None


def _book_shard(account: Account, shard: Shard, costs: Costs | None) -> None:
    coming = shard.state is not ShardState.READY
    if costs is None:
        share = -(-shard.bytes_total // len(shard.layers))
        account.take(shard.model_id, dict.fromkeys(shard.layers.layers, share), coming=coming, foreign=True)
        return
    sizes = costs.sizes(shard.quantization)
    account.take(costs.model_id, {i: sizes[i + 1] - sizes[i] for i in shard.layers.layers}, coming=coming)
    if not coming:
        account.ready.setdefault(costs.model_id, set()).update(shard.layers.layers)


def _book_directive(account: Account, directive: Directive, costs: Costs | None) -> None:
    if directive.kind is DirectiveKind.DROP_SHARD:
        account.drop(directive.model_id, directive.layers.layers)
    elif costs is None:
        account.take(directive.model_id, dict.fromkeys(directive.layers.layers, 0), coming=True, foreign=True)
    else:
        account.load(costs, directive.layers, directive.quantization)
