"""The plan of the whole mesh: clear what is not wanted, cover, then strengthen.

What is planned depends on nothing but what the planner knows now. It keeps its books between plans only so that a
change of one node costs the work of one node, not of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from meshnet.directive import Directive
from meshnet.topology import DeployedModel, Node
from services.tracker.placement.accounts import Account, Known, believed_bytes, open_account
from services.tracker.placement.book import Book
from services.tracker.placement.cover import Placer
from services.tracker.placement.redundancy import Strengthener, most_replicas, trim
from services.tracker.placement.swaps import swap
from services.tracker.placement.types import Draft, Plan, Policy, Shortfall


class Planner:
    """Told of nodes and models as they change; `plan` says what to order. It orders nothing itself: what was ordered
    comes back as open directives of the nodes."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._known: dict[str, Known] = {}
        self._book = Book()
        # Nodes that may want more, and nodes whose holdings may want clearing.
        self._hungry: set[str] = set()
        self._unchecked: set[str] = set()

    @property
    def models(self) -> dict[str, DeployedModel]:
        return {model_id: costs.model for model_id, costs in self._book.models.items()}

    def set_models(self, models: Iterable[DeployedModel]) -> None:
        """The deployed models."""
        models = list(models)
        if {model.model_id: model for model in models} == self.models:
            return
        self._book = Book(models)
        for known in self._known.values():
            self._open(known)

    def set_node(self, known: Known) -> None:
        """A node that is new, or of which anything has changed."""
        if self._known.get(known.node.node_id) != known:
            self._known[known.node.node_id] = known
            sourced = self._book.sourced()
            self._open(known)
            self._wake(sourced)

    def remove_node(self, node_id: str) -> None:
        if self._known.pop(node_id, None) is not None:
            sourced = self._book.sourced()
            self._book.remove(node_id)
            self._hungry.discard(node_id)
            self._unchecked.discard(node_id)
            self._wake(sourced)

    def account(self, node_id: str) -> Account:
        """The books of one node. Raises KeyError."""
        return self._book.accounts[node_id]

    def knows(self, node_id: str) -> Known | None:
        return self._known.get(node_id)

    def believed_bytes(self, failed: Directive) -> int:
        """What to believe of a node's memory once this LOAD_SHARD failed there."""
        known = self._known[failed.node_id]
        others = tuple(d for d in known.directives if d.directive_id != failed.directive_id)
        return believed_bytes(replace(known, directives=others), self._book.models, failed, self.policy)

    def plan(self, policy: Policy | None = None) -> Plan:
        """What to order now. Asked twice without a change in between, it answers the same."""
        unchecked = set(self._unchecked)
        try:
            plan, sated = self._plan(policy or self.policy)
        finally:
            touched, self._book.touched = self._book.touched, set()
            for node_id in touched:
                self._open(self._known[node_id])
            self._unchecked = unchecked & touched
        self._hungry -= sated - touched
        return plan

    @contextmanager
    def supposing(
        self, *, without: Collection[str] = (), models: Iterable[DeployedModel] | None = None
    ) -> Iterator[None]:
        """For the length of a `with`: some nodes are gone, or other models are deployed."""
        gone = [self._known[node_id] for node_id in sorted(without) if node_id in self._known]
        before = self.models
        try:
            for known in gone:
                self.remove_node(known.node.node_id)
            if models is not None:
                self.set_models(models)
            yield
        finally:
            self.set_models(before.values())
            for known in gone:
                self.set_node(known)

    def _plan(self, policy: Policy) -> tuple[Plan, set[str]]:
        book = self._book
        drafts = self._clear() + self._empty() + trim(book)
        shortfalls: list[Shortfall] = []
        for costs in book.models.values():
            placer = Placer(book, costs, policy, "have no node")
            placed, missing = placer.place(list(book.tally(costs.model_id).gaps()))
            drafts += placed
            shortfalls += missing
        # They serve it until it is loaded elsewhere, or for good if it cannot be.
        for costs in book.models.values() if book.draining else ():
            placer = Placer(book, costs, policy, "move off a node that is drained")
            placed, missing = placer.place(list(book.tally(costs.model_id).leaving()))
            drafts += placed
            shortfalls += missing
        if shortfalls:
            return Plan(tuple(drafts), tuple(shortfalls)), set()
        hungry = self._hungry | book.touched
        roomy = book.roomiest(hungry, at_least=self._smallest_layer())
        strengthened, sated = Strengthener(book, policy).strengthen(roomy, policy.max_redundant)
        sated |= hungry - {account.node_id for account in roomy}
        unfinished = len(strengthened) >= policy.max_redundant
        if not unfinished:
            swapped, unfinished = swap(book, policy)
            strengthened += swapped
        return Plan((*drafts, *strengthened), (), unfinished), sated

    def _smallest_layer(self) -> int:
        """No layer of any model has fewer bytes."""
        return min((costs.smallest(1) for costs in self._book.models.values()), default=0)

    def _open(self, known: Known) -> None:
        self._book.put(open_account(known, self._book.models, self.policy))
        self._hungry.add(known.node.node_id)
        self._unchecked.add(known.node.node_id)

    def _wake(self, sourced_before: frozenset[str]) -> None:
        """A node has changed or is gone: others may now take what they could not, where replicas are limited, where
        stubs may serve what real nodes did, and where there is a source of weights now."""
        self._hungry |= self._book.stubs
        if self._book.sourced() - sourced_before:
            self._hungry |= self._book.fetchers
        limited = [costs for costs in self._book.models.values() if costs.model.replicas]
        tallies = ((costs, self._book.tally(costs.model_id)) for costs in limited)
        if any(min(tally.staying) < most_replicas(costs, tally) for costs, tally in tallies):
            self._hungry |= self._known.keys()

    def _clear(self) -> list[Draft]:
        """Drops what no deployed model needs: other models, other revisions, stubs once real nodes serve everything."""
        book = self._book
        drafts: list[Draft] = []
        for node_id in sorted(self._unchecked | book.stubs):
            account = book.accounts[node_id]
            unwanted = [(i, tuple(layers), _why_foreign(book, i)) for i, layers in account.foreign.items()]
            unwanted += [
                (i, tuple(layers), f"real nodes serve all of {i}")
                for i, layers in account.held.items()
                if account.node.stub and book.is_served_by_real_nodes(i)
            ]
            for model_id, layers, reason in sorted(unwanted):
                if model_id not in account.stuck:
                    drafts += book.drop(account, model_id, layers, reason)
        return drafts

    def _empty(self) -> list[Draft]:
        """Drops from draining nodes what others serve by now."""
        book = self._book
        drafts: list[Draft] = []
        for account in (book.accounts[node_id] for node_id in sorted(book.draining)):
            for model_id in book.models if account.node.alive else ():
                ready = book.tally_of(account, model_id).ready
                layers = [layer for layer in account.layers(model_id) if ready[layer]]
                if model_id not in account.stuck:
                    why = "the node is drained; these layers are served elsewhere"
                    drafts += book.drop(account, model_id, layers, why)
        return drafts


def _why_foreign(book: Book, model_id: str) -> str:
    if model_id in book.models:
        return f"the node has another revision of {model_id} than the mesh serves"
    return f"{model_id} is not deployed"


def plan(
    nodes: Iterable[Node],
    models: Iterable[DeployedModel],
    directives: Iterable[Directive] = (),
    *,
    refused: Mapping[str, int] | None = None,
    stuck: Collection[tuple[str, str]] = frozenset(),
    policy: Policy | None = None,
) -> Plan:
    """What to order, given the nodes with what they report, the deployed models and the open directives.

    `directives` are in the order of issue. `refused`: bytes that a node can hold at most, learned from failed loads.
    `stuck`: (node id, model id) whose drops have failed and are not ordered again. The plan of a settled mesh is empty.
    """
    planner = Planner(policy)
    planner.set_models(models)
    directives = list(directives)
    for node in nodes:
        planner.set_node(
            Known(
                node,
                tuple(d for d in directives if d.node_id == node.node_id),
                (refused or {}).get(node.node_id),
                frozenset(model_id for node_id, model_id in stuck if node_id == node.node_id),
            )
        )
    return planner.plan()
