"""Plans, the directives that come of them, and what their failures teach. Pure; times are monotonic, in seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from meshnet.directive import Directive, DirectiveKind, FailureKind
from meshnet.topology import DeployedModel, Node
from services.tracker.beliefs import Beliefs
from services.tracker.directives import Ledger
from services.tracker.effects import Note
from services.tracker.news import shortfall_news
from services.tracker.placement import Known, Plan, Planner, Policy

# As good as no limit: what `rebalance` strives for.
ANY_COUNT = 1_000_000


class Placing:
    """One plan at a time: it is made and booked before the next change is looked at.

    `plan` is the last one. Its number grows with every plan that orders something.
    """

    def __init__(self, new_id: Callable[[], str], policy: Policy, first_version: int) -> None:
        self.ledger = Ledger(new_id)
        self.plan = Plan()
        self.notes: list[Note] = []
        self._planner = Planner(policy)
        self._beliefs = Beliefs()
        self._version = first_version
        self._heard_at: dict[str, float] = {}
        # By model: the newest plan that was made before a source of it came.
        self._sources_came: dict[str, int] = {}

    def outgrow(self, plan_version: int) -> None:
        """A node has obeyed a plan of this number: the next must have a higher one, or the node refuses it."""
        self._version = max(self._version, plan_version)

    def set_node(self, node_id: str, node: Node | None) -> None:
        """A node has changed, or is gone."""
        if node is None:
            self._planner.remove_node(node_id)
            return
        belief = self._beliefs.of(node_id)
        self._planner.set_node(
            Known(
                _without_counters(node),
                self.ledger.open(node_id),
                belief.refused,
                frozenset(belief.stuck),
                belief.barred,
            )
        )

    def forget(self, node_id: str, why: str) -> None:
        """The node is gone, or is another process now."""
        self.ledger.fail_node(node_id, why)
        self._beliefs.forget(node_id)
        self._heard_at.pop(node_id, None)

    def registered(self, node_id: str) -> None:
        """What it could not fetch it may try again."""
        self._beliefs.of(node_id).sourceless.clear()

    def may_fetch(self, model_ids: Collection[str]) -> set[str]:
        """As Beliefs.may_fetch. Who is still looking for a source, and finds none, may look again."""
        self._sources_came |= dict.fromkeys(self._planner.models.keys() & model_ids, self._version)
        return self._beliefs.may_fetch(model_ids)

    def heard(self, node_id: str, now: float) -> None:
        """The node has said something of a directive."""
        self._heard_at[node_id] = now

    def replan(self, models: Mapping[str, DeployedModel], now: float) -> tuple[Directive, ...]:
        """Makes a plan and books it."""
        before = {model_id: self.plan.shortfall(model_id) for model_id in models}
        self._planner.set_models(models.values())
        self.plan = self._planner.plan()
        self.notes += shortfall_news(models, before, self.plan)
        return self._issue(now)

    def rebalance(self, models: Mapping[str, DeployedModel], now: float) -> tuple[Directive, ...]:
        """As `replan`, and moves redundant replicas also where the gain is small."""
        self._planner.set_models(models.values())
        self.plan = self._planner.plan(self._eager())
        return self._issue(now)

    def preview(
        self, without: Collection[str] = (), models: Iterable[DeployedModel] | None = None, *, rebalance: bool = False
    ) -> Plan:
        """The plan that would be made if some nodes were gone or other models deployed. Changes nothing."""
        with self._planner.supposing(without=without, models=models):
            return self._planner.plan(self._eager() if rebalance else None)

    def room(self, node_id: str) -> tuple[int, int, int | None]:
        """Bytes that a node's shards take or will take, that it may still be given, and that a failed load has taught
        it to hold at most."""
        account = self._planner.account(node_id)
        return account.shard_bytes, max(0, account.free), self._beliefs.of(node_id).refused

    def failed(self, directive: Directive) -> None:
        """A node could not do it: what does that say of the node?"""
        self.notes.append(
            Note(f"directive failed: {_what(directive)}: {directive.failure or 'no reason given'}", logging.WARNING)
        )
        node_id = directive.node_id
        known = self._planner.knows(node_id)
        if known is None or _is_pointless(directive, known.node) or self._is_outdated(directive):
            return
        held = self._planner.account(node_id).used
        believed = self._planner.believed_bytes(directive)
        lesson = self._beliefs.to_change(node_id).learn(directive, held, believed)
        if lesson:
            self.notes.append(Note(f"node {node_id} is now believed: {lesson}", logging.WARNING))

    def give_up_silent(self, now: float, seconds: float) -> list[str]:
        """Ends the directives of nodes that have said nothing of them for so long, and returns these nodes."""
        silent = [i for i in self.ledger.nodes_with_open() if self._heard_at.get(i, now) + seconds <= now]
        for node_id in silent:
            for directive in self.ledger.fail_node(node_id, f"nothing heard of it for {seconds:g} s"):
                self.failed(directive)
        return silent

    def _issue(self, now: float) -> tuple[Directive, ...]:
        if self.plan.drafts:
            self._version += 1
        issued = self.ledger.issue(self.plan.drafts, self._version)
        for directive in issued:
            self._heard_at[directive.node_id] = now
            self.notes.append(Note(f"directive issued: {_what(directive)}: {directive.reason}"))
        return issued

    def _is_outdated(self, directive: Directive) -> bool:
        """It found no source, but one has come since it was issued."""
        issued_before = directive.plan_version <= self._sources_came.get(directive.model_id, -1)
        return directive.failure_kind is FailureKind.NO_SOURCE and issued_before

    def _eager(self) -> Policy:
        return replace(self._planner.policy, swap_below=ANY_COUNT, swap_ratio=1.0)


def finished_note(directive: Directive) -> Note:
    return Note(f"directive finished: {_what(directive)} is {directive.state} ({directive.reason})")


def _what(directive: Directive) -> str:
    return f"{directive.kind} {directive.model_id} {directive.layers} on {directive.node_id}"


def _is_pointless(directive: Directive, node: Node) -> bool:
    """A load of what is loaded already: that it failed says nothing about memory."""
    is_load = directive.kind is DirectiveKind.LOAD_SHARD
    return is_load and node.layers(directive.model_id).issuperset(directive.layers.layers)


def _without_counters(node: Node) -> Node:
    """The node less what changes all the time and matters to no plan."""
    links = tuple(link for link in node.links if not link.node_id)
    return replace(node, num_sessions=0, resident_bytes=0, kv_tokens_free=0, queue_length=0, probes=(), links=links)
