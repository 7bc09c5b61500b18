"""Which redundant replicas may go to make room for layers that need it more."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations, islice, product
from math import comb, prod

from meshnet.model import LayerRange
from services.tracker.placement.accounts import Account
from services.tracker.placement.book import Book

# In a large mesh this many nodes are looked at before all are.
FEW_ACCOUNTS = 64
# So many ways to share what not all holders can drop are tried.
MAX_WAYS = 128

Rights = set[tuple[str, int]]
"""Layers as (model id, layer) that a node may drop."""


def rights_of(book: Book, account: Account, keep: int = 1) -> Rights:
    """What this node may drop if no other node drops anything: layers that at least `keep` others serve too.

    What a suspect or draining node holds may be gone any moment: it makes no other replica redundant. A stub replaces
    nothing real.
    """
    if account.closed:
        return set()
    return {
        (model_id, layer)
        for model_id, layers in account.ready.items()
        if model_id not in account.stuck
        for ready in (book.tally_of(account, model_id).ready,)
        for layer in layers
        if ready[layer] > keep
    }


def rights_together(book: Book, pool: Sequence[Account], keep: int = 1) -> Iterator[dict[str, Rights]]:
    """What each may drop, by node, so that `keep` nodes still serve every layer even if all drop all of it.

    What only some of the holders can drop is claimed in the order of the pool; in a small case every other way to
    share it follows.
    """
    rights = {account.node_id: rights_of(book, account, keep) for account in pool}
    claims: dict[tuple[bool, str, int], list[str]] = {}
    for account in pool:
        for model_id, layer in sorted(rights[account.node_id]):
            claims.setdefault((account.node.stub, model_id, layer), []).append(account.node_id)
    contested = {}
    for (stub, model_id, layer), claimants in claims.items():
        allowed = book.tally_of(book.accounts[claimants[0]], model_id).ready[layer] - keep
        if allowed < len(claimants):
            contested[stub, model_id, layer] = (claimants, allowed)
    ways = prod(comb(len(claimants), allowed) for claimants, allowed in contested.values())
    options = product(*(combinations(claimants, allowed) for claimants, allowed in contested.values()))
    for granted in islice(options, ways if ways <= MAX_WAYS else 1):
        shared = {node_id: set(of_node) for node_id, of_node in rights.items()}
        for ((_, model_id, layer), (claimants, _)), winners in zip(contested.items(), granted, strict=True):
            for node_id in set(claimants) - set(winners):
                shared[node_id].discard((model_id, layer))
        yield shared


def donors(book: Book, model_id: str) -> Iterator[list[Account]]:
    """Nodes that could make room for the model: in a large mesh first a few that hold the most replicated layers, then
    all of them."""
    if len(book.accounts) > FEW_ACCOUNTS:
        yield _most_redundant(book, model_id)
    yield book.takers(model_id)


def _most_redundant(book: Book, model_id: str) -> list[Account]:
    layers = (
        (count, owner, layer)
        for owner in book.models
        for layer, count in enumerate(book.tally(owner).ready)
        if count > 1
    )
    found: dict[str, Account] = {}
    for _, owner, layer in heapq.nlargest(FEW_ACCOUNTS, layers):
        for node_id in sorted(book.tally(owner).holders[layer]):
            account = book.accounts[node_id]
            if book.may_take(account, model_id):
                found[node_id] = account
        if len(found) >= FEW_ACCOUNTS:
            break
    return [account for _, account in sorted(found.items())]


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
