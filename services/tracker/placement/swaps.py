"""Swaps: a replica of what is held most gives way to one of what is held least. The only moves for balance."""

from __future__ import annotations

from collections.abc import Iterator

from meshnet.model import LayerRange
from services.tracker.placement.accounts import Account
from services.tracker.placement.bins import make_bin
from services.tracker.placement.book import Book
from services.tracker.placement.costs import Costs
from services.tracker.placement.cover import drop_all
from services.tracker.placement.redundancy import most_replicas, shortest_piece
from services.tracker.placement.room import choose_drops, donors, freed, rights_of
from services.tracker.placement.tally import Tally
from services.tracker.placement.types import Draft, Policy

# Whatever the policy, a layer gives way only to one with so many replicas less: then nothing ever swaps back.
LEAST_GAIN = 2


def swap(book: Book, policy: Policy) -> tuple[list[Draft], bool]:
    """Drops and loads, and whether there may be more to do. Every layer has a replica before, and keeps one after."""
    drafts: list[Draft] = []
    for _ in range(policy.max_swaps):
        swapped = _swap_one(book, policy)
        if not swapped:
            return drafts, False
        drafts += swapped
    return drafts, True


def _swap_one(book: Book, policy: Policy) -> list[Draft]:
    weakest = sorted(_weak_runs(book, policy), key=lambda weak: (weak[2], -len(weak[1])))
    for costs, run, count in weakest[: policy.max_swaps]:
        keep = _kept(count, policy)
        if max(max(_spread(book, book.tally(model_id))) for model_id in book.models) <= keep:
            continue
        # The first pool holds the most replicated layers: where it has none to spare, no other has.
        pool = next(iter(donors(book, costs.model_id)))
        offers = [offer for account in pool if (offer := _offer(book, costs, run, keep, account, policy))]
        if offers:
            _, account, layers, drops = min(offers, key=lambda offer: offer[0])
            return _drafts(book, costs, account, layers, drops, count)
    return []


def _kept(count: int, policy: Policy) -> int:
    """How many replicas a layer must keep that gives way to one with `count`."""
    return max(count + LEAST_GAIN - 1, int(count * policy.swap_ratio))


def _spread(book: Book, tally: Tally) -> list[int]:
    """By layer the replicas that do not fail together: those of one site count once, if there are several sites."""
    return tally.num_sites if book.has_sites else tally.staying


def _weak_runs(book: Book, policy: Policy) -> Iterator[tuple[Costs, LayerRange, int]]:
    """Runs of equally weak layers, with the number of their replicas."""
    for costs in book.models.values():
        tally = book.tally(costs.model_id)
        spread = _spread(book, tally)
        limit = min(policy.swap_below, most_replicas(costs, tally))
        if min(spread) >= limit:
            continue
        start = 0
        for layer, count in enumerate(spread):
            if layer + 1 == costs.num_layers or spread[layer + 1] != count:
                if count < limit:
                    yield costs, LayerRange(start, layer + 1), count
                start = layer + 1


Offer = tuple[tuple[int, int, bool, str], Account, LayerRange, list[tuple[str, int]]]


def _offer(book: Book, costs: Costs, run: LayerRange, keep: int, account: Account, policy: Policy) -> Offer | None:
    """The most layers of the run that the node could take in the place of replicas of which `keep` remain."""
    tally = book.tally(costs.model_id)
    here = tally.at_site.get(account.node.site) if book.has_sites else None
    held = account.layers(costs.model_id)
    if any(layer in held or (here is not None and here[layer]) for layer in run.layers):
        return None
    shortest = min(len(run), shortest_piece(costs, account, policy))
    rights = {
        (model_id, layer)
        for model_id, layer in rights_of(book, account, keep)
        if _spread(book, book.tally_of(account, model_id))[layer] > keep
    }
    room = account.free + freed(account, rights)
    if not rights or room < costs.smallest(shortest):
        return None
    taker = make_bin(costs, account, run, room, account.node.quantization)
    ends = {start: taker.reach(start, run.end) for start in run.layers}
    start = max(ends, key=lambda start: (ends[start] - start, -start))
    if ends[start] - start < shortest:
        return None
    layers = LayerRange(start, ends[start])
    need = costs.of(layers, account.node.quantization) - account.free
    drops = choose_drops(account, rights, need, costs.model_id, layers)
    if not drops:
        return None  # Free room is for redundancy to fill, in pieces of a useful size.
    fetches = not account.has_files(costs.model_id)
    return (-len(layers), freed(account, drops), fetches, account.node_id), account, layers, drops


def _drafts(
    book: Book, costs: Costs, account: Account, layers: LayerRange, drops: list[tuple[str, int]], count: int
) -> list[Draft]:
    model_id = costs.model_id
    replicas = f"{count} replica{'s' if count > 1 else ''}"
    why = f"gives way to layers {layers} of {model_id}, which have {replicas}"
    load_why = f"layers {layers} of {model_id} have {replicas}, others many more"
    drafts = drop_all(book, account, drops, why)
    return [*drafts, book.load(account, costs, layers, account.node.quantization, load_why)]
