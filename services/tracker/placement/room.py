"""Which redundant replicas may go to make room for layers that nobody holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from meshnet.model import LayerRange
from services.tracker.placement.accounts import Account

Rights = dict[str, set[tuple[str, int]]]
"""By node id: layers as (model id, layer) that the node may drop."""


class Replicas:
    """How often each layer is served now, among real nodes and among stub nodes (a stub replaces nothing real).

    What a suspect or draining node holds may be gone any moment: it makes no other replica redundant.
    """

    def __init__(self, accounts: Iterable[Account], stuck: Collection[tuple[str, str]]) -> None:
        self._accounts = list(accounts)
        self._stuck = stuck
        self._count = Counter(
            (account.node.stub, model_id, layer)
            for account in self._accounts
            if not account.closed
            for model_id, layers in account.ready.items()
            for layer in layers
        )

    def alone(self, account: Account) -> set[tuple[str, int]]:
        """What this node may drop if no other node drops anything."""
        return {
            (model_id, layer)
            for model_id, layers in account.ready.items()
            if not account.closed and (account.node_id, model_id) not in self._stuck
            for layer in layers
            if self._count[account.node.stub, model_id, layer] > 1
        }

    def together(self, order: Iterable[Account]) -> Rights:
        """What each node may drop so that, even if all drop all of it, every layer is still served."""
        left = Counter(self._count)
        rights: Rights = {}
        for account in order:
            granted = rights.setdefault(account.node_id, set())
            for model_id, layer in sorted(self.alone(account)):
                if left[account.node.stub, model_id, layer] > 1:
                    left[account.node.stub, model_id, layer] -= 1
                    granted.add((model_id, layer))
        return rights


def freed(account: Account, layers: Iterable[tuple[str, int]]) -> int:
    """Bytes that dropping these layers gives back."""
    return sum(account.held[model_id][layer] for model_id, layer in layers)


def choose_drops(
    account: Account, rights: Collection[tuple[str, int]], need: int, model_id: str, piece: LayerRange
) -> list[tuple[str, int]]:
    """Layers to drop so that at least `need` bytes come free, and none that need not go.

    Layers of the same model go first, those farthest from the piece before others, so that what stays is in one range
    with it. The rights must be worth `need` bytes.
    """

    def order(item: tuple[str, int]) -> tuple[bool, str, int]:
        owner, layer = item
        distance = max(piece.start - layer, layer - piece.end) if owner == model_id else layer
        return (owner != model_id, owner, -distance)

    chosen: list[tuple[str, int]] = []
    total = 0
    for item in sorted(rights, key=order):
        if total >= need:
            break
        chosen.append(item)
        total += freed(account, [item])
    return _without_spare(account, chosen, total - need)


def _without_spare(account: Account, chosen: Sequence[tuple[str, int]], spare: int) -> list[tuple[str, int]]:
    kept = []
    for item in chosen:
        size = freed(account, [item])
        if size <= spare:
            spare -= size
        else:
            kept.append(item)
    return kept
