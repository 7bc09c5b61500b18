"""All accounts, and what is derived from them: tallies by model, and who has most room. One change costs little."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshnet.directive import DirectiveKind
from meshnet.model import LayerRange, Quantization, merge_layers
from meshnet.topology import DeployedModel
from services.tracker.placement.accounts import Account
from services.tracker.placement.costs import NANOSECONDS, Costs
from services.tracker.placement.tally import Tally
from services.tracker.placement.types import Draft


class Book:
    """The accounts of all nodes. Every change goes through `put`, `remove`, `load` and `drop`.

    `models`: costs of the deployed ones in the order in which they are placed. `touched`: nodes whose accounts `load`
    and `drop` have changed, so that they no longer say what the nodes themselves report. `fetchers`: nodes that take
    layers of models whose files they lack.
    """

    def __init__(self, models: Iterable[DeployedModel] = ()) -> None:
        ranked = sorted(models, key=lambda model: (-model.priority, model.model_id))
        self.models: Mapping[str, Costs] = {model.model_id: Costs(model) for model in ranked}
        self.accounts: dict[str, Account] = {}
        self.draining: set[str] = set()
        self.stubs: set[str] = set()
        self.fetchers: set[str] = set()
        self._sites: Counter[str] = Counter()
        self.touched: set[str] = set()
        self._by_room: list[tuple[int, str]] = []
        self._tallies = {(i, stub): Tally(costs) for i, costs in self.models.items() for stub in (False, True)}

    def put(self, account: Account) -> None:
        """Adds or replaces the account of a node."""
        self.remove(account.node_id)
        self.accounts[account.node_id] = account
        if account.node.draining:
            self.draining.add(account.node_id)
        if account.node.stub:
            self.stubs.add(account.node_id)
        if account.fetches:
            self.fetchers.add(account.node_id)
        self._sites[account.node.site] += 1
        self._count(account, 1)

    def remove(self, node_id: str) -> None:
        account = self.accounts.pop(node_id, None)
        if account is None:
            return
        self.draining.discard(node_id)
        self.stubs.discard(node_id)
        self.fetchers.discard(node_id)
        self._sites -= Counter([account.node.site])
        self._count(account, -1)

    @property
    def has_sites(self) -> bool:
        """Whether there is more than one, so that replicas can be spread over them."""
        return len(self._sites) > 1

    def tally(self, model_id: str) -> Tally:
        """Among the real nodes that hold layers of the model or could, or the stub nodes if there is no such."""
        real = self._tallies[model_id, False]
        return real if real.num_members else self._tallies[model_id, True]

    def tally_of(self, account: Account, model_id: str) -> Tally:
        """Among the nodes of this one's kind."""
        return self._tallies[model_id, account.node.stub]

    def sourced(self) -> frozenset[str]:
        """Models whose files a real node has, so that others can fetch their weights from it."""
        return frozenset(model_id for model_id in self.models if self._tallies[model_id, False].num_sources)

    def may_take(self, account: Account, model_id: str) -> bool:
        """Whether the node can be given layers of the model: it has the files or can fetch the weights, is no stub
        beside real ones, not closed, and holds nothing of another revision."""
        real = self._tallies[model_id, False]
        return (
            not account.closed
            and model_id not in account.barred
            and model_id not in account.foreign
            and (account.has_files(model_id) or (account.fetches and real.num_sources > 0))
            and (not account.node.stub or not real.num_members)
        )

    def by_room(self, at_least: int = 0) -> Iterator[Account]:
        """Open accounts, those with most free bytes first, down to `at_least`. Nothing may be booked on the way."""
        for minus_free, node_id in self._by_room:
            if -minus_free < at_least:
                return
            yield self.accounts[node_id]

    def roomiest(self, node_ids: Iterable[str], at_least: int) -> list[Account]:
        """Open accounts among these nodes, those with most free bytes first, that have `at_least` so many."""
        accounts = (self.accounts[node_id] for node_id in node_ids if node_id in self.accounts)
        roomy = (account for account in accounts if not account.closed and account.free >= at_least)
        return sorted(roomy, key=lambda account: (-account.free, account.node_id))

    def takers(self, model_id: str) -> list[Account]:
        """All nodes that can be given layers of the model, by id."""
        return sorted(
            (a for a in self.accounts.values() if self.may_take(a, model_id)), key=lambda account: account.node_id
        )

    def is_served_by_real_nodes(self, model_id: str) -> bool:
        return 0 not in self._tallies[model_id, False].ready

    def load(self, account: Account, costs: Costs, layers: LayerRange, quantization: Quantization, why: str) -> Draft:
        """Books the layers and drafts the directive."""
        self._count(account, -1)
        account.load(costs, layers, quantization)
        self._count(account, 1)
        self.touched.add(account.node_id)
        return Draft(
            node_id=account.node_id,
            kind=DirectiveKind.LOAD_SHARD,
            model_id=costs.model_id,
            layers=layers,
            quantization=quantization,
            reason=why,
            revision=costs.model.manifest.revision,
            kv_tokens=costs.model.kv_tokens,
            kv_precision=costs.model.kv_precision,
        )

    def drop(self, account: Account, model_id: str, layers: Iterable[int], why: str) -> list[Draft]:
        """Takes the layers off the books and drafts one directive a range."""
        ranges: Sequence[LayerRange] = merge_layers(frozenset(layers))
        if ranges:
            self._count(account, -1)
            for gone in ranges:
                account.drop(model_id, gone.layers)
            self._count(account, 1)
            self.touched.add(account.node_id)
        return [
            Draft(account.node_id, DirectiveKind.DROP_SHARD, model_id, gone, account.node.quantization, why)
            for gone in ranges
        ]

    def _count(self, account: Account, sign: int) -> None:
        # The tallies of models that the node does not hold change in the number of members alone.
        rate = self._rate(account)
        concerned = (account.node.available_models & self.models.keys()) | account.held.keys()
        for model_id in self.models if account.fetches else concerned:
            self._tallies[model_id, account.node.stub].count(account, sign, rate)
        if account.closed:
            return
        entry = (-account.free, account.node_id)
        if sign > 0:
            insort(self._by_room, entry)
        else:
            del self._by_room[bisect_left(self._by_room, entry)]

    def _rate(self, account: Account) -> int:
        """Thousandths of a decode step a second through all that the node holds: its models share its time."""
        nanoseconds = 0
        for costs in (self.models[model_id] for model_id in account.held):
            speed = costs.bytes_per_second(account.node, account.node.quantization)
            nanoseconds += account.stage_work(costs) * NANOSECONDS // speed
        return 1000 * NANOSECONDS // max(1, nanoseconds)
