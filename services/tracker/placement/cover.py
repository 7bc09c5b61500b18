"""Coverage: a first replica for every layer, in free room or in room that redundant replicas give up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from meshnet.model import LayerRange, Quantization
from meshnet.sizes import format_size
from services.tracker.placement.accounts import Account
from services.tracker.placement.bins import make_bin
from services.tracker.placement.book import Book
from services.tracker.placement.cheapest import arrange_cheaply
from services.tracker.placement.costs import Costs
from services.tracker.placement.cut import Cut, Piece, arrange, fill, scatter
from services.tracker.placement.room import (
    FEW_ACCOUNTS,
    Rights,
    choose_drops,
    donors,
    freed,
    rights_of,
    rights_together,
)
from services.tracker.placement.types import Draft, Policy, Shortfall

Choose = Callable[[Account], Quantization]
"""The quantization at which a node would take layers."""


def preferred(account: Account) -> Quantization:
    return account.node.quantization


@dataclass(frozen=True, slots=True)
class MadeRoom:
    """Layers that a node could load at a quantization once it has dropped others, as (model id, layer)."""

    account: Account
    drops: Sequence[tuple[str, int]]
    layers: LayerRange
    quantization: Quantization


class Placer:
    """Places runs of one model. Runs that nobody holds yet while others of the model are held are refilled with the
    fewest bytes; a model that nobody holds is placed by shape."""

    def __init__(self, book: Book, costs: Costs, policy: Policy, why: str) -> None:
        self._book = book
        self._costs = costs
        self._policy = policy
        self._why = why
        self._is_refill = any(book.tally(costs.model_id).held)

    def place(self, runs: Iterable[LayerRange]) -> tuple[list[Draft], list[Shortfall]]:
        """Each run whole or not at all."""
        drafts: list[Draft] = []
        shortfalls: list[Shortfall] = []
        for run in runs:
            placed = self._place(run)
            if placed is None:
                shortfalls.append(_shortfall(self._book, self._costs, run))
            else:
                drafts += placed
        return drafts, shortfalls

    def _place(self, run: LayerRange) -> list[Draft] | None:
        """A node's preference gives way only where the layers would else have no place."""

        def lightest(account: Account) -> Quantization:
            return min(account.node.quantizations, key=lambda q: self._costs.of(run, q))

        for choose in (preferred, lightest):
            placed = self._in_room(run, choose)
            if placed is not None:
                return placed
        return None

    def _in_room(self, run: LayerRange, choose: Choose) -> list[Draft] | None:
        """In free room, unless that takes many pieces where replicas that are held three times can give way to fewer;
        else in room that redundant replicas give up; else in free room layer by layer."""
        cut = self._in_free_room(run, choose)
        if cut is not None and len(cut) <= self._policy.few_pieces:
            return [self._load(piece) for piece in cut]
        offer = self._in_made_room(run, choose, keep=1 if cut is None else 2)
        if offer is not None and (cut is None or self._moved(offer) < self._cut_moved(cut)):
            return [draft for made in offer for draft in self._make_room(made)]
        cut = cut or self._scattered(run, choose)
        return [self._load(piece) for piece in cut] if cut else None

    def _in_free_room(self, run: LayerRange, choose: Choose) -> Cut | None:
        for pool in self._pools(run):
            cut = self._arrange(pool, run, {a.node_id: a.free for a in pool}, choose)
            if cut is not None:
                return cut
        return None

    def _scattered(self, run: LayerRange, choose: Choose) -> Cut | None:
        *_, pool = self._pools(run)
        return scatter([make_bin(self._costs, a, run, a.free, choose(a)) for a in pool], run)

    def _pools(self, run: LayerRange) -> Iterable[list[Account]]:
        """In a large mesh first the nodes with most room and those beside the run, then all with any room."""
        book, model_id = self._book, self._costs.model_id
        if len(book.accounts) <= FEW_ACCOUNTS:
            yield book.takers(model_id)
            return
        smallest = min(self._costs.of(LayerRange(i, i + 1), q) for i in run.layers for q in Quantization)
        roomy = [account for account in book.by_room(smallest) if book.may_take(account, model_id)]
        if len(roomy) > FEW_ACCOUNTS:
            holders = book.tally(model_id).holders
            beside = {
                node_id for i in (run.start - 1, run.end) if 0 <= i < self._costs.num_layers for node_id in holders[i]
            }
            entry = [a for a in roomy[FEW_ACCOUNTS:] if a.node_id in beside or a.node.tracker_node]
            yield [*roomy[:FEW_ACCOUNTS], *entry[:FEW_ACCOUNTS]]
        yield roomy

    def _in_made_room(self, run: LayerRange, choose: Choose, keep: int) -> list[MadeRoom] | None:
        """Drops redundant replicas, of which `keep` others remain: all of the run on one node if that can be, else
        spread over several."""
        for pool in donors(self._book, self._costs.model_id):
            offers = [self._on_one(pool, run, choose, keep)]
            if offers[0] is None or (self._is_refill and len({choose(account) for account in pool}) > 1):
                offers += self._on_several(pool, run, choose, keep)
            found = [offer for offer in offers if offer is not None]
            if found:
                return min(found, key=self._moved) if self._is_refill else found[0]
        return None

    def _moved(self, offer: Sequence[MadeRoom]) -> tuple[int, int]:
        """Bytes that it loads, and in how many pieces."""
        return sum(self._costs.moved(made.layers, made.quantization) for made in offer), len(offer)

    def _cut_moved(self, cut: Cut) -> tuple[int, int]:
        return sum(piece.node.moved(piece.layers) for piece in cut), len(cut)

    def _on_one(self, pool: Sequence[Account], run: LayerRange, choose: Choose, keep: int) -> list[MadeRoom] | None:
        choices: list[tuple[tuple[int, bool, int, bool, str], Account, list[tuple[str, int]]]] = []
        for account in pool:
            rights = rights_of(self._book, account, keep)
            quantization = choose(account)
            need = self._costs.of(run, quantization) - account.free
            if freed(account, rights) >= need:
                drops = choose_drops(account, rights, need, self._costs.model_id, run)
                moved = self._costs.moved(run, quantization) if self._is_refill else 0
                # The tracker-node's node keeps the first layers if another one can give way.
                fetches = not account.has_files(self._costs.model_id)
                rank = (moved, account.node.tracker_node, freed(account, drops), fetches, account.node_id)
                choices.append((rank, account, drops))
        if not choices:
            return None
        _, account, drops = min(choices, key=lambda choice: choice[0])
        return [MadeRoom(account, drops, run, choose(account))]

    def _on_several(
        self, pool: Sequence[Account], run: LayerRange, choose: Choose, keep: int
    ) -> Iterator[list[MadeRoom] | None]:
        """For each way to share what may be dropped. The tracker-node's node is the last to drop anything."""
        order = sorted(pool, key=lambda a: (a.node.tracker_node, -a.free, a.node_id))
        ways = rights_together(self._book, order, keep)
        for rights in ways if self._is_refill else islice(ways, 1):
            room = {a.node_id: a.free + freed(a, rights[a.node_id]) for a in order}
            cut = self._arrange(order, run, room, choose)
            yield [self._made(piece, rights) for piece in cut] if cut else None

    def _made(self, piece: Piece, rights: Mapping[str, Rights]) -> MadeRoom:
        account = self._book.accounts[piece.node.node_id]
        need = self._costs.of(piece.layers, piece.node.quantization) - account.free
        drops = choose_drops(account, rights[account.node_id], need, self._costs.model_id, piece.layers)
        return MadeRoom(account, drops, piece.layers, piece.node.quantization)

    def _make_room(self, piece: MadeRoom) -> list[Draft]:
        model_id = self._costs.model_id
        reason = f"makes room for layers {piece.layers} of {model_id}; these layers are served elsewhere too"
        drafts = drop_all(self._book, piece.account, piece.drops, reason)
        why = self._reason(piece.layers)
        return [*drafts, self._book.load(piece.account, self._costs, piece.layers, piece.quantization, why)]

    def _load(self, piece: Piece) -> Draft:
        account = self._book.accounts[piece.node.node_id]
        why = self._reason(piece.layers)
        return self._book.load(account, self._costs, piece.layers, piece.node.quantization, why)

    def _reason(self, layers: LayerRange) -> str:
        return f"layers {layers} of {self._costs.model_id} {self._why}"

    def _arrange(self, pool: Sequence[Account], run: LayerRange, room: Mapping[str, int], choose: Choose) -> Cut | None:
        """The tracker-node's node takes the first layers if it has room for at least one."""
        bins = [make_bin(self._costs, a, run, room[a.node_id], choose(a)) for a in pool]
        slack = self._policy.adjacent_slack
        if run.start == 0:
            tracker_nodes = {account.node_id for account in pool if account.node.tracker_node}
            for lead in (b for b in bins if b.node_id in tracker_nodes and b.reach(0, 1) == 1):
                cut = arrange(bins, run, slack, lead)
                if cut is not None:
                    return cut
        cut = None if self._is_refill else arrange(bins, run, slack)
        return cut or arrange_cheaply(bins, run, slack)


def drop_all(book: Book, account: Account, layers: Iterable[tuple[str, int]], reason: str) -> list[Draft]:
    """Drops layers of several models from one node."""
    by_model: dict[str, list[int]] = {}
    for model_id, layer in layers:
        by_model.setdefault(model_id, []).append(layer)
    drafts: list[Draft] = []
    for model_id, gone in sorted(by_model.items()):
        drafts += book.drop(account, model_id, gone, reason)
    return drafts


def _shortfall(book: Book, costs: Costs, run: LayerRange) -> Shortfall:
    """Says what is left over when all free room is filled."""
    model_id = costs.model_id
    pool = [account for account in book.by_room() if book.may_take(account, model_id)]
    pool = pool or book.takers(model_id)
    if not pool:
        size = costs.of(run, Quantization.BFLOAT16)
        text = f"layers {run} of {model_id}: {_why_no_taker(book, model_id)}"
        return Shortfall(model_id, run, size, text)
    placed = fill([make_bin(costs, a, run, a.free, preferred(a)) for a in pool[: len(run) * 2]], run)
    end = placed[-1].layers.end if placed else run.start
    left = LayerRange(end, run.end) if end < run.end else run
    taken = {piece.node.node_id: costs.of(piece.layers, piece.node.quantization) for piece in placed}
    free = {account.node_id: account.free - taken.get(account.node_id, 0) for account in pool}
    best = max(sorted(free), key=lambda node_id: free[node_id])
    quantization = book.accounts[best].node.quantization
    size = costs.of(left, quantization)
    text = (
        f"layers {left} of {model_id} ({format_size(size)} at {quantization}, KV cache included) fit on no node; "
        f"largest free: {best} with {format_size(max(0, free[best]))}"
    )
    if left.start > run.start:
        text += f" once layers {run.start}-{left.start} are placed; nothing is loaded until all fits"
    return Shortfall(model_id, left, size, text)


def _why_no_taker(book: Book, model_id: str) -> str:
    if book.fetchers and model_id not in book.sourced():
        return "no node here has the files of this model, so that nobody can fetch its weights"
    if book.fetchers:
        return "no node here that takes layers has the files of this model or can fetch its weights"
    return "no node here has the files of this model and takes layers"
