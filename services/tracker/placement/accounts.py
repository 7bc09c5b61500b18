"""The memory of each node, layer by layer, as it will be when its open directives are done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from meshnet.directive import Directive, DirectiveKind
from meshnet.model import LayerRange, Quantization
from meshnet.topology import DeployedModel, Node, Shard, ShardState
from services.tracker.placement.types import Policy


def layer_bytes(model: DeployedModel, layer: int, quantization: Quantization) -> int:
    """Weights and KV cache of one layer; layer 0 also pays for the entry weights."""
    return model.manifest.shard_bytes(LayerRange(layer, layer + 1), quantization, model.kv_tokens)


class Account:
    """One node. A node runs its directives in order, so an open DROP frees room for a LOAD issued after it.

    `held`: bytes by model and layer of all that the node holds or will hold. `ready`: layers by model that serve now
    and that no open directive drops. `capacity` is in bytes, workspace included. A `closed` node gets nothing
    new and makes no room. A suspect one keeps what it holds until it is heard again or lost; of a draining one, what
    others serve is dropped.
    """

    def __init__(self, node: Node, capacity: int, policy: Policy) -> None:
        self.node = node
        self.capacity = capacity
        self.held: dict[str, dict[int, int]] = {}
        self.ready: dict[str, set[int]] = {}
        self._workspace = policy.workspace_bytes

    @property
    def node_id(self) -> str:
        return self.node.node_id

    @property
    def closed(self) -> bool:
        return self.node.draining or not self.node.alive

    @property
    def used(self) -> int:
        return self._workspace + sum(sum(layers.values()) for layers in self.held.values())

    @property
    def free(self) -> int:
        """Bytes to give; negative if the node holds more than it should."""
        free = self.capacity - self.used
        return min(0, free) if self.closed else free

    def layers(self, model_id: str) -> Collection[int]:
        return self.held.get(model_id, {}).keys()

    def take(self, model_id: str, sizes: Mapping[int, int]) -> None:
        held = self.held.setdefault(model_id, {})
        for layer, size in sizes.items():
            held[layer] = max(size, held.get(layer, 0))

    def load(self, model: DeployedModel, layers: LayerRange) -> None:
        self.take(model.model_id, {i: layer_bytes(model, i, self.node.quantization) for i in layers.layers})

    def drop(self, model_id: str, layers: Iterable[int]) -> None:
        for layer in layers:
            self.held.get(model_id, {}).pop(layer, None)
            self.ready.get(model_id, set()).discard(layer)


class Costs:
    """Running sums of a model's layer costs at each quantization, so that any range costs one subtraction."""

    def __init__(self, model: DeployedModel) -> None:
        self.model = model
        self._prefix: dict[Quantization, Sequence[int]] = {}

    @cached_property
    def num_layers(self) -> int:
        return self.model.manifest.num_layers

    def prefix(self, quantization: Quantization) -> Sequence[int]:
        """`prefix[end] - prefix[start]` are the bytes of layers `[start, end)`."""
        if quantization not in self._prefix:
            sizes = (layer_bytes(self.model, layer, quantization) for layer in range(self.num_layers))
            self._prefix[quantization] = tuple(accumulate(sizes, initial=0))
        return self._prefix[quantization]

    def of(self, layers: LayerRange, quantization: Quantization) -> int:
        prefix = self.prefix(quantization)
        return prefix[layers.end] - prefix[layers.start]


def open_accounts(
    nodes: Iterable[Node],
    models: Iterable[DeployedModel],
    directives: Iterable[Directive] = (),
    refused: Mapping[str, int] | None = None,
    policy: Policy | None = None,
) -> list[Account]:
    """Accounts by node id. `directives` are the open ones, in the order of issue; `refused` as in `plan`."""
    deployed = {model.model_id: model for model in models}
    policy = policy or Policy()
    believed = refused or {}
    by_node: dict[str, list[Directive]] = {}
    for directive in directives:
        by_node.setdefault(directive.node_id, []).append(directive)
    accounts = []
    for node in sorted(nodes, key=lambda n: n.node_id):
        account = Account(node, min(node.vram_bytes, believed.get(node.node_id, node.vram_bytes)), policy)
        for shard in node.shards:
            _book_shard(account, shard, _served(node, shard.model_id, shard.layers, deployed))
        for directive in by_node.get(node.node_id, ()):
            _book_directive(account, directive, _served(node, directive.model_id, directive.layers, deployed))
        accounts.append(account)
    return accounts


def believed_bytes(
    node: Node,
    models: Iterable[DeployedModel],
    open_directives: Iterable[Directive],
    failed: Directive,
    policy: Policy | None = None,
) -> int:
    """What to believe of a node's memory once a LOAD_SHARD failed there: what it holds, and half of what it refused.

    Half, not one byte less: a load that can never work is given up after a few tries instead of one a layer.
    """
    deployed = {model.model_id: model for model in models}
    (account,) = open_accounts([node], deployed.values(), open_directives, policy=policy)
    model = deployed.get(failed.model_id)
    if model is None:
        return account.capacity
    held = account.layers(failed.model_id)
    wanted = (layer_bytes(model, i, failed.quantization) for i in failed.layers.layers if i not in held)
    return min(account.capacity, account.used + sum(wanted) // 2)


def _served(
    node: Node, model_id: str, layers: LayerRange, deployed: Mapping[str, DeployedModel]
) -> DeployedModel | None:
    """The deployed model that these layers are of; None for a model or revision that the mesh does not serve."""
    model = deployed.get(model_id) if model_id in node.available_models else None
    return model if model is not None and layers in model.manifest.all_layers else None


def _book_shard(account: Account, shard: Shard, model: DeployedModel | None) -> None:
    if model is None:
        share = -(-shard.bytes_total // len(shard.layers))
        account.take(shard.model_id, dict.fromkeys(shard.layers.layers, share))
        return
    account.take(model.model_id, {i: layer_bytes(model, i, shard.quantization) for i in shard.layers.layers})
    if shard.state is ShardState.READY:
        account.ready.setdefault(model.model_id, set()).update(shard.layers.layers)


def _book_directive(account: Account, directive: Directive, model: DeployedModel | None) -> None:
    if directive.kind is DirectiveKind.DROP_SHARD:
        account.drop(directive.model_id, directive.layers.layers)
    elif model is None:
        account.take(directive.model_id, dict.fromkeys(directive.layers.layers, 0))
    else:
        account.take(
            model.model_id, {i: layer_bytes(model, i, directive.quantization) for i in directive.layers.layers}
        )
