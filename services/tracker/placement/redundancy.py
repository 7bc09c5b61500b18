"""Redundancy: what is left after coverage strengthens the layers with the fewest replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log

from meshnet.model import LayerRange
from services.tracker.placement.accounts import Account
from services.tracker.placement.bins import Bin, make_bin
from services.tracker.placement.book import Book
from services.tracker.placement.costs import Costs
from services.tracker.placement.tally import Tally
from services.tracker.placement.types import Draft, Policy

ORDINALS = {1: "second", 2: "third"}

Rank = tuple[float, int, int, bool, int, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """A window of a model that a node could take. The lowest rank is the best: fewest replicas (one at the node's own
    site counts twice), then the slowest stage, then an entry shard, then the longest."""

    rank: Rank
    costs: Costs
    layers: LayerRange


class Strengthener:
    """Gives nodes with room further replicas, the roomiest node first. Every layer has a replica before."""

    def __init__(self, book: Book, policy: Policy) -> None:
        self._book = book
        self._policy = policy

    def strengthen(self, accounts: Sequence[Account], limit: int) -> tuple[list[Draft], set[str]]:
        """Up to `limit` loads on these nodes, and the ids of nodes for which nothing more was found."""
        drafts: list[Draft] = []
        sated: set[str] = set()
        for account in accounts:
            while len(drafts) < limit:
                choice = self._best(account)
                if choice is None:
                    sated.add(account.node_id)
                    break
                drafts.append(self._load(account, choice))
            else:
                break
        return drafts, sated

    def _load(self, account: Account, choice: Choice) -> Draft:
        layers, model_id = choice.layers, choice.costs.model_id
        held = self._book.tally(model_id).staying
        fewest = min(held[layer] for layer in layers.layers)
        why = f"{ORDINALS.get(fewest, 'further')} replica of layers {layers} of {model_id}"
        return self._book.load(account, choice.costs, layers, account.node.quantization, why)

    def _best(self, account: Account) -> Choice | None:
        found = [choice for costs in self._book.models.values() if (choice := self._best_of(costs, account))]
        return min(found, key=lambda choice: choice.rank) if found else None

    def _best_of(self, costs: Costs, account: Account) -> Choice | None:
        model_id, quantization = costs.model_id, account.node.quantization
        shortest = shortest_piece(costs, account, self._policy)
        if account.free < costs.smallest(shortest) or not self._book.may_take(account, model_id):
            return None
        tally = self._book.tally(model_id)
        limit = most_replicas(costs, tally)
        held = account.layers(model_id)
        opening = [count < limit and layer not in held for layer, count in enumerate(tally.staying)]
        counts = _felt_counts(tally, account)
        taker = make_bin(costs, account, LayerRange(0, costs.num_layers), account.free, quantization)
        best: Choice | None = None
        for layers in _windows(taker, opening, counts):
            if len(layers) >= shortest:
                mean = sum(counts[layers.start : layers.end]) / len(layers)
                slowest = _step(min(tally.rate[layers.start : layers.end]))
                typical = _step(sum(tally.rate[layers.start : layers.end]) // len(layers))
                entry = layers.start != 0
                rank = (min(mean, self._policy.enough_replicas), slowest, typical, entry, -len(layers), layers.start)
                if best is None or rank < best.rank:
                    best = Choice(rank, costs, layers)
        return best


def shortest_piece(costs: Costs, account: Account, policy: Policy) -> int:
    """Fewest layers of the model that are worth a replica on this node."""
    able = costs.most_layers(account.capacity, account.node.quantization)
    return max(1, min(costs.num_layers // policy.min_piece_divisor, able // 2))


def most_replicas(costs: Costs, tally: Tally) -> int:
    """How many replicas a layer of the model may have."""
    return min(tally.num_members, costs.model.replicas or tally.num_members)


def trim(book: Book) -> list[Draft]:
    """Drops what is more than a model may have, those nodes first that hold most of it."""
    drafts: list[Draft] = []
    for costs in book.models.values():
        while costs.model.replicas and (found := _most_surplus(book, costs)):
            account, layers = found
            why = f"{costs.model_id} is deployed with at most {costs.model.replicas} replicas"
            drafts += book.drop(account, costs.model_id, layers, why)
    return drafts


def _most_surplus(book: Book, costs: Costs) -> tuple[Account, list[int]] | None:
    tally, limit = book.tally(costs.model_id), costs.model.replicas or 0
    surplus = {
        layer
        for layer, (ready, staying) in enumerate(zip(tally.ready, tally.staying, strict=True))
        if min(ready, staying) > limit
    }
    holders = (book.accounts[i] for i in sorted({i for layer in surplus for i in tally.holders[layer]}))
    offers = [
        (account, sorted(surplus & account.ready[costs.model_id]))
        for account in holders
        if costs.model_id not in account.stuck
    ]
    return min(offers, key=lambda offer: (offer[0].node.tracker_node, -len(offer[1])), default=None)


def _step(rate: int) -> int:
    """Rates that differ by less than a quarter count as equal."""
    return int(log(rate + 1, 1.25))


def _felt_counts(tally: Tally, account: Account) -> Sequence[int]:
    """Replicas of each layer; where the node's own site holds one it adds less: they may fail together."""
    here = tally.at_site.get(account.node.site)
    if here is None:
        return tally.staying
    return [count + (1 if at_site else 0) for count, at_site in zip(tally.staying, here, strict=True)]


def _windows(taker: Bin, opening: Sequence[bool], counts: Sequence[int]) -> Iterator[LayerRange]:
    """From every start the longest window that fits, and the longest with no more replicas than its first layer."""
    ends = _run_ends(opening, None)
    level_ends = _run_ends(opening, counts)
    for start, end in ends.items():
        for window_end in {taker.reach(start, end), taker.reach(start, level_ends[start])}:
            if window_end > start:
                yield LayerRange(start, window_end)


def _run_ends(opening: Sequence[bool], label: Sequence[int] | None) -> Mapping[int, int]:
    """By open layer: one past the last layer of the run of open, equally labelled layers that it is in."""
    ends: dict[int, int] = {}
    for layer in range(len(opening) - 1, -1, -1):
        if opening[layer]:
            joined = layer + 1 in ends and (label is None or label[layer + 1] == label[layer])
            ends[layer] = ends[layer + 1] if joined else layer + 1
    return ends
