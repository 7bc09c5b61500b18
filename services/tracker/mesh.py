"""The state of the mesh and all decisions on it. Pure: time is an argument, ids come from a callable.

Methods change the state and return effects: what to send, to log and to save. An error changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from meshnet.directive import Directive, DirectiveState
from meshnet.errors import InvalidRequest, UnknownModel
from meshnet.model import ModelManifest
from meshnet.sizes import format_size
from meshnet.topology import DeployedModel, Node, RouteProbe, Shard, Topology
from services.tracker import placement
from services.tracker.beliefs import Beliefs
from services.tracker.directives import Ledger
from services.tracker.effects import Effects, Note, Settings
from services.tracker.news import CoverageNews, shortfall_news
from services.tracker.placement import Plan
from services.tracker.registry import MAX_MODEL_BYTES, Member, Registry, check_probes
from services.tracker.remembered import NodeLog, Remembered, Save, SaveModel, SaveUndeployed
from services.tracker.settling import Settling
from services.tracker.view import described, layers_of, published, settled


class Mesh:
    """Registry, deployed models, directives and plan. `topology` is the last published snapshot."""

    def __init__(
        self,
        settings: Settings,
        new_id: Callable[[], str],
        *,
        now: float = 0.0,
        first_version: int = 0,
        remembered: Remembered | None = None,
    ) -> None:
        """`first_version`: topology versions grow from here; it must be above those of an earlier run, of which
        `remembered` is the saved state."""
        remembered = remembered or Remembered()
        self.settings = settings
        self.registry = Registry(settings.lease_seconds, settings.suspect_seconds)
        self.ledger = Ledger(new_id)
        self.plan = Plan()
        self._models: dict[str, DeployedModel] = dict(remembered.models)
        self.topology = Topology(first_version, models=dict(self._models))
        # An undeploy is the later word than a flag of the command line that is the same at every start.
        self._to_deploy = set(settings.auto_deploy) - self._models.keys() - remembered.undeployed
        holders = [node_id for node_id, assignments in remembered.nodes.items() if assignments]
        self._settling = Settling(now, settings.settle_seconds, holders)
        self._node_log = NodeLog(remembered)
        self.registry.draining.update(remembered.draining)
        self._plan_version = 0
        self._beliefs = Beliefs()
        self._reported_at: dict[str, float] = {}
        self._coverage_news = CoverageNews()
        self._notes: list[Note] = []
        self._saves: list[Save] = []
        for model in self._models.values():
            self.registry.pin(model.manifest)
            self._note(f"model {model.model_id} is deployed, as before the restart")
        for model_id in sorted(remembered.undeployed & set(settings.auto_deploy)):
            self._note(f"model {model_id} stays undeployed, as it was left: `meshnet deploy {model_id}` brings it back")

    # Nodes

    def register(self, node: Node, incarnation: str, manifests: Sequence[ModelManifest], now: float) -> Effects:
        """Raises InvalidRequest or Unregistered as Registry.register does."""
        node_id = node.node_id
        outcome = self.registry.register(node, incarnation, manifests, now)
        if outcome.restarted:
            self._forget(node_id, "the node was restarted")
        self._settling.joined(node_id, brings_layers=bool(node.shards) and outcome.is_new, now=now)
        how = "joined" if outcome.is_new else "is back as a new process" if outcome.restarted else "registered again"
        self._note(f"node {node_id} {how}: {described(node, manifests)}")
        for model_id in outcome.other_revisions:
            text = f"node {node_id} has another revision of {model_id} than the mesh serves; it gets no layers of it"
            self._note(text, logging.WARNING)
        for model_id in sorted(self._to_deploy & self.registry.manifests.keys()):
            self._deploy(model_id, self.settings.auto_kv_tokens, 0)
        return self._replan(now)

    def heartbeat(
        self,
        node_id: str,
        incarnation: str,
        shards: Sequence[Shard],
        now: float,
        *,
        num_sessions: int = 0,
        resident_bytes: int = 0,
        kv_tokens_free: int = 0,
        probes: Sequence[RouteProbe] = (),
    ) -> Effects:
        """Renews the lease. Raises Unregistered, or InvalidRequest for shards or probes that the node cannot have."""
        member = self.registry.member(node_id, incarnation)
        self.registry.check_shards(member, shards)
        check_probes(node_id, probes)
        was_suspect = self._heard(member, now)
        before, was_proven = member.node.shards, member.node.probes
        reported_at = self._reported_at.get(node_id)
        just_reported = reported_at is not None and now - reported_at < self.settings.stale_seconds
        if not just_reported:
            self.registry.set_shards(member, shards)
        member.node = replace(
            member.node, num_sessions=num_sessions, resident_bytes=resident_bytes, kv_tokens_free=kv_tokens_free
        )
        self.registry.set_probes(member, probes)
        if not was_suspect and layers_of(before) == layers_of(member.node.shards):
            # Counters alone wait for the next tick, unless they tell what a shard that came or went has changed.
            return self._publish(now) if just_reported or member.node.probes != was_proven else Effects()
        return self._replan(now)

    def report(
        self,
        node_id: str,
        incarnation: str,
        directive_id: str,
        state: DirectiveState,
        shards: Sequence[Shard],
        now: float,
        *,
        bytes_done: int = 0,
        bytes_total: int = 0,
        failure: str = "",
    ) -> Effects:
        """A node acknowledges a directive. Raises Unregistered or InvalidRequest."""
        member = self.registry.member(node_id, incarnation)
        if max(bytes_done, bytes_total) > MAX_MODEL_BYTES:
            raise InvalidRequest(f"a directive of over {MAX_MODEL_BYTES} bytes is not possible")
        self.registry.check_shards(member, shards)
        was_open = any(d.directive_id == directive_id for d in self.ledger.open(node_id))
        directive = self.ledger.report(
            node_id, directive_id, state, bytes_done=bytes_done, bytes_total=bytes_total, failure=failure
        )
        was_suspect = self._heard(member, now)
        if not was_open:
            return self._replan(now) if was_suspect else Effects()  # The node sent its last report again.
        if not directive.state.is_final:
            self.registry.set_shards(member, shards)
            return self._replan(now) if was_suspect else self._publish(now)
        self._reported_at[node_id] = now
        self.registry.set_shards(member, settled(shards, directive))
        self._finish(member, directive)
        return self._replan(now)

    def leave(self, node_id: str, incarnation: str, now: float) -> Effects:
        """Raises Unregistered."""
        self.registry.leave(node_id, incarnation)
        self._forget(node_id, "the node left")
        self._note(f"node {node_id} left")
        return self._replan(now)

    def tick(self, now: float) -> Effects:
        """Call about once a second: marks suspect nodes, forgets lost ones, publishes counters, ends a pause."""
        lost = self.registry.expire(now)
        for node_id in lost:
            self._forget(node_id, "the node was lost")
            silence = f"nothing heard from it for {self.settings.lease_seconds:g} s"
            self._note(f"node {node_id} lost: {silence}", logging.WARNING)
        for node_id in self.registry.suspect(now):
            silence = f"nothing heard from it for {self.settings.suspect_seconds:g} s"
            self._note(f"node {node_id} is suspect: {silence}", logging.WARNING)
        return self._replan(now) if lost or self._settling.is_due(now) else self._publish(now)

    def drain(self, node_id: str, now: float, *, cancel: bool = False) -> Effects:
        """Gives a node no more layers, and drops its own as soon as others serve them; or ends that.

        It ends by itself when the node leaves, is lost or is restarted. Raises Unregistered for a node not here.
        """
        self.registry.set_draining(node_id, not cancel)
        self._note(f"node {node_id} {'is no longer drained' if cancel else 'is drained'}")
        return self._replan(now)

    def evict(self, node_id: str, now: float) -> Effects:
        """Forgets a node, whose process is not taken back. Raises Unregistered for a node not here."""
        self.registry.evict(node_id)
        self._forget(node_id, "the node was evicted")
        self._note(f"node {node_id} evicted: it may come back as a new process", logging.WARNING)
        return self._replan(now)

    # Models

    def deploy(self, model_id: str, kv_tokens: int, priority: int, now: float) -> Effects:
        """Raises UnknownModel, or InvalidRequest if loaded shards promise other KV cache room."""
        if model_id not in self.registry.manifests:
            known = ", ".join(sorted(self.registry.manifests)) or "none"
            raise UnknownModel(
                f"no node has the files of model {model_id!r}; known models: {known}. "
                f"Start a node that has them: --model {model_id}=PATH"
            )
        self._deploy(model_id, kv_tokens, priority)
        return self._replan(now)

    def undeploy(self, model_id: str, now: float) -> Effects:
        """Raises UnknownModel for a model that is not deployed."""
        self.deployed(model_id)
        del self._models[model_id]
        self._to_deploy.discard(model_id)
        self.registry.unpin(model_id)
        self._saves.append(SaveUndeployed(model_id))
        self._note(f"model {model_id} undeployed")
        return self._replan(now)

    def deployed(self, model_id: str) -> DeployedModel:
        """Raises UnknownModel, naming the deployed models."""
        if model_id not in self._models:
            deployed = ", ".join(sorted(self._models)) or "none"
            raise UnknownModel(f"model {model_id!r} is not deployed; deployed models: {deployed}")
        return self._models[model_id]

    # Inside

    def _deploy(self, model_id: str, kv_tokens: int, priority: int) -> None:
        manifest = self.registry.manifests[model_id]
        model = DeployedModel(manifest, kv_tokens or manifest.context_length, priority)
        old = self._models.get(model_id)
        if old is not None and old.kv_tokens != model.kv_tokens and self._is_held(model_id):
            raise InvalidRequest(
                f"model {model_id} is loaded with KV cache room for {old.kv_tokens} tokens, not {model.kv_tokens}: "
                "undeploy it first, or deploy it with the same number"
            )
        self._models[model_id] = model
        self._to_deploy.discard(model_id)
        self.registry.pin(manifest)
        if model != old:
            self._saves.append(SaveModel(model))
            self._note(f"model {model_id} deployed: KV cache room for {model.kv_tokens} tokens, priority {priority}")

    def _heard(self, member: Member, now: float) -> bool:
        was_suspect = self.registry.renew(member, now)
        if was_suspect:
            self._note(f"node {member.node.node_id} is heard again")
        return was_suspect

    def _is_held(self, model_id: str) -> bool:
        return any(shard.model_id == model_id for node in self._view().values() for shard in node.shards)

    def _forget(self, node_id: str, why: str) -> None:
        self.ledger.fail_node(node_id, why)
        self.registry.draining.discard(node_id)
        self._beliefs.forget(node_id)
        self._reported_at.pop(node_id, None)

    def _finish(self, member: Member, directive: Directive) -> None:
        what = f"{directive.kind} {directive.model_id} {directive.layers} on {directive.node_id}"
        if directive.state is not DirectiveState.FAILED:
            self._note(f"directive finished: {what} is {directive.state} ({directive.reason})")
            return
        self._note(f"directive failed: {what}: {directive.failure or 'no reason given'}", logging.WARNING)
        node = self.registry.nodes()[directive.node_id]
        open_directives = self.ledger.open(node.node_id)
        believed = self._beliefs.learn(directive, node, self._models.values(), open_directives, self.settings.policy)
        if believed is not None:
            self._note(f"node {node.node_id} is now believed to hold {format_size(believed)}", logging.WARNING)

    def _replan(self, now: float) -> Effects:
        """One plan at a time: it is made and booked before the next change is looked at."""
        if self._settling.pauses(now):
            return self._publish(now)
        self._settling.placed()
        nodes = self.registry.nodes().values()
        before = {model_id: self.plan.shortfall(model_id) for model_id in self._models}
        self.plan = placement.plan(
            nodes,
            self._models.values(),
            self.ledger.open(),
            refused=self._beliefs.refused,
            stuck=self._beliefs.stuck,
            policy=self.settings.policy,
        )
        self._notes += shortfall_news(self._models, before, self.plan)
        if self.plan.drafts:
            self._plan_version += 1
        issued = self.ledger.issue(self.plan.drafts, self._plan_version)
        for d in issued:
            self._note(f"directive issued: {d.kind} {d.model_id} {d.layers} on {d.node_id}: {d.reason}")
        return replace(self._publish(now), directives=issued)

    def _publish(self, now: float) -> Effects:
        """A new snapshot, if anything in it has changed."""
        nodes = self._view()
        changed = nodes != self.topology.nodes or self._models != self.topology.models
        if changed:
            self._saves += self._node_log.note(self.topology.nodes, nodes)
            self.topology = Topology(self.topology.version + 1, nodes, dict(self._models))
            self._notes += self._coverage_news.of(self.topology)
        if not self._settling.pauses(now):
            self._saves += self._node_log.forget_all_but(nodes)
            self.registry.draining &= nodes.keys()
        notes, self._notes = tuple(self._notes), []
        saves, self._saves = tuple(self._saves), []
        return Effects(topology_changed=changed, notes=notes, saves=saves)

    def _view(self) -> dict[str, Node]:
        return {i: published(node, self.ledger.open(i)) for i, node in self.registry.nodes().items()}

    def _note(self, text: str, level: int = logging.INFO) -> None:
        self._notes.append(Note(text, level))
