"""The state of the mesh and all decisions on it. Pure: time is an argument, ids come from a callable.

Methods change the state and return effects: what to send, to log and to save. An error changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from meshnet.directive import Directive, DirectiveState, FailureKind
from meshnet.errors import InvalidRequest
from meshnet.model import KvPrecision, ModelManifest
from meshnet.topology import DeployedModel, Link, Node, RouteProbe, Shard, Speed, Topology
from services.tracker.deployments import Deployments
from services.tracker.directives import Ledger
from services.tracker.effects import Effects, Note, Settings
from services.tracker.placement import Plan
from services.tracker.placing import Placing, finished_note
from services.tracker.publisher import Publisher
from services.tracker.registry import MAX_MODEL_BYTES, Member, Registry, check_measurements, check_probes
from services.tracker.remembered import Remembered, Save, SaveEvicted
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
        """`first_version`: topology versions and plan numbers grow from here; it must be above those of an earlier run,
        of which `remembered` is the saved state."""
        remembered = remembered or Remembered()
        self.settings = settings
        self.registry = Registry(settings.lease_seconds, settings.suspect_seconds, remembered.evicted)
        self._placing = Placing(new_id, settings.policy, first_version)
        self._deployments = Deployments(self.registry, settings.auto_deploy, remembered)
        self._publisher = Publisher(first_version, self._models, remembered)
        holders = [node_id for node_id, assignments in remembered.nodes.items() if assignments]
        self._settling = Settling(now, settings.settle_seconds, holders)
        self.registry.draining.update(remembered.draining)
        self._reported_at: dict[str, float] = {}
        self._has_forgotten = False
        self._unplanned: set[str] = set()
        self._unpublished: set[str] = set()
        self._notes: list[Note] = []
        self._saves: list[Save] = []

    @property
    def topology(self) -> Topology:
        return self._publisher.topology

    @property
    def ledger(self) -> Ledger:
        return self._placing.ledger

    @property
    def plan(self) -> Plan:
        return self._placing.plan

    # Nodes

    def register(
        self,
        node: Node,
        incarnation: str,
        manifests: Sequence[ModelManifest],
        now: float,
        *,
        newest_plan_version: int = 0,
    ) -> Effects:
        """`newest_plan_version` is of the newest plan that the node has obeyed.

        Raises InvalidRequest or Unregistered as Registry.register does.
        """
        node_id = node.node_id
        self._placing.outgrow(newest_plan_version)
        outcome = self.registry.register(node, incarnation, manifests, now)
        if outcome.restarted:
            self._forget(node_id, "the node was restarted")
        self._settling.joined(node_id, brings_layers=bool(node.shards) and outcome.is_new, now=now)
        how = "joined" if outcome.is_new else "is back as a new process" if outcome.restarted else "registered again"
        self._note(f"node {node_id} {how}: {described(node, manifests)}")
        for model_id in outcome.other_revisions:
            then = "fetches the mesh's if it gets layers" if node.fetches else "gets no layers of it"
            text = f"node {node_id} has another revision of {model_id} than the mesh serves; it {then}"
            self._note(text, logging.WARNING)
        self._placing.registered(node_id)
        self._unplanned |= self._placing.may_fetch(self._sources(node, manifests))
        for model_id in self._deployments.due():
            kv = self.settings.auto_kv_precision
            self._deploy(self.wished(model_id, self.settings.auto_kv_tokens, 0, kv_precision=kv))
        return self._replan(now)

    def refused_models(self, manifests: Sequence[ModelManifest], *, fetches: bool = False) -> dict[str, str]:
        """Of a node's models those that the mesh serves otherwise, each with the reason, for people.

        A node that `fetches` weights gets layers of them all the same.
        """
        if fetches:
            return {}
        return {
            manifest.model_id: (
                f"this node's files of {manifest.model_id} are another revision than the mesh serves: "
                f"{manifest.revision[:12]} here, {known.revision[:12]} in the mesh; copy them from a node that has "
                "those, or serve these under another name"
            )
            for manifest in manifests
            if (known := self.registry.manifests.get(manifest.model_id)) and not self.registry.is_served(manifest)
        }

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
        queue_length: int = 0,
        memory_free_bytes: int | None = None,
        workspace_bytes: int | None = None,
        probes: Sequence[RouteProbe] = (),
        speeds: Sequence[Speed] = (),
        links: Sequence[Link] = (),
    ) -> Effects:
        """Renews the lease. Raises Unregistered, or InvalidRequest for what the node cannot have."""
        member = self.registry.member(node_id, incarnation)
        self.registry.check_shards(member, shards)
        check_probes(node_id, probes)
        check_measurements(node_id, speeds, links)
        was_suspect = self._heard(member, now)
        before = member.node
        reported_at = self._reported_at.get(node_id)
        just_reported = reported_at is not None and now - reported_at < self.settings.stale_seconds
        if not just_reported:
            self.registry.set_shards(member, shards)
        self.registry.set_node(
            member,
            replace(
                member.node,
                num_sessions=num_sessions,
                resident_bytes=resident_bytes,
                kv_tokens_free=kv_tokens_free,
                queue_length=queue_length,
                memory_free_bytes=memory_free_bytes,
                workspace_bytes=workspace_bytes,
                probes=tuple(probes),
                speeds=tuple(speeds),
                links=tuple(links),
            ),
        )
        has_other_room = member.node.workspace_bytes != before.workspace_bytes
        if was_suspect or has_other_room or layers_of(before.shards) != layers_of(member.node.shards):
            return self._replan(now)
        # Counters alone wait for the next tick, unless they tell what a shard that came or went has changed.
        return self._publish(now) if just_reported or member.node.probes != before.probes else Effects()

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
        failure_kind: FailureKind | None = None,
        newest_plan_version: int = 0,
    ) -> Effects:
        """A node acknowledges a directive. Raises Unregistered or InvalidRequest."""
        member = self.registry.member(node_id, incarnation)
        if max(bytes_done, bytes_total) > MAX_MODEL_BYTES:
            raise InvalidRequest(f"a directive of over {MAX_MODEL_BYTES} bytes is not possible")
        self.registry.check_shards(member, shards)
        was_open = any(d.directive_id == directive_id for d in self.ledger.open(node_id))
        directive = self.ledger.report(
            node_id,
            directive_id,
            state,
            bytes_done=bytes_done,
            bytes_total=bytes_total,
            failure=failure,
            failure_kind=failure_kind,
        )
        self._placing.outgrow(newest_plan_version)
        self._placing.heard(node_id, now)
        was_suspect = self._heard(member, now)
        if not was_open:
            return self._replan(now) if was_suspect else Effects()  # The node sent its last report again.
        if not directive.state.is_final:
            self.registry.set_shards(member, shards)
            return self._replan(now) if was_suspect else self._publish(now)
        self._reported_at[node_id] = now
        self.registry.set_shards(member, settled(shards, directive))
        if directive.state is DirectiveState.FAILED:
            self._sync()
            self._placing.failed(directive)
            self._unplanned.add(node_id)
        else:
            self._notes.append(finished_note(directive))
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
        silent = self._placing.give_up_silent(now, self.settings.answer_seconds)
        due = lost or silent or self.plan.unfinished or self._settling.is_due(now)
        return self._replan(now) if due else self._publish(now)

    def drain(self, node_id: str, now: float, *, cancel: bool = False) -> Effects:
        """Gives a node no more layers, and drops its own as soon as others serve them; or ends that.

        It ends by itself when the node leaves, is lost or is restarted. Raises Unregistered for a node not here.
        """
        self.registry.set_draining(node_id, not cancel)
        self._note(f"node {node_id} {'is no longer drained' if cancel else 'is drained'}")
        return self._replan(now)

    def evict(self, node_id: str, now: float) -> Effects:
        """Forgets a node, whose process is not taken back. Raises Unregistered for a node not here."""
        self._saves.append(SaveEvicted(node_id, self.registry.evict(node_id)))
        self._forget(node_id, "the node was evicted")
        self._note(f"node {node_id} evicted: it may come back as a new process", logging.WARNING)
        return self._replan(now)

    # Models

    def deploy(
        self,
        model_id: str,
        kv_tokens: int,
        priority: int,
        now: float,
        *,
        max_context: int = 0,
        sessions: int = 0,
        replicas: int = 0,
        kv_precision: KvPrecision = KvPrecision.BFLOAT16,
    ) -> Effects:
        """Zeros stand for what `wished` says.

        Raises UnknownModel, or InvalidRequest if loaded shards promise other KV cache room.
        """
        self._deploy(self.wished(model_id, kv_tokens, priority, max_context, sessions, replicas, kv_precision))
        return self._replan(now)

    def wished(
        self,
        model_id: str,
        kv_tokens: int,
        priority: int,
        max_context: int = 0,
        sessions: int = 0,
        replicas: int = 0,
        kv_precision: KvPrecision = KvPrecision.BFLOAT16,
    ) -> DeployedModel:
        """As Deployments.wished."""
        return self._deployments.wished(model_id, kv_tokens, priority, max_context, sessions, replicas, kv_precision)

    def undeploy(self, model_id: str, now: float) -> Effects:
        """Raises UnknownModel for a model that is not deployed."""
        self._deployments.remove(model_id)
        # Deployed again it may be of another revision, which others have.
        self._unplanned |= self._placing.may_fetch({model_id})
        return self._replan(now)

    def deployed(self, model_id: str) -> DeployedModel:
        """Raises UnknownModel, naming the deployed models."""
        return self._deployments.get(model_id)

    # Plans

    def preview(
        self, without: Collection[str] = (), deploy: DeployedModel | None = None, *, rebalance: bool = False
    ) -> Plan:
        """The plan that would be made if some nodes were gone or a model was deployed. Changes nothing.

        Raises InvalidRequest for what `deploy` would refuse.
        """
        if deploy is not None:
            self._deployments.check_room(deploy, self._held_models())
        self._sync()
        models = self._models | ({deploy.model_id: deploy} if deploy else {})
        return self._placing.preview(without, models.values(), rebalance=rebalance)

    def rebalance(self, now: float) -> Effects:
        """Moves redundant replicas from where there are many to where there are few, also where the gain is small.

        Raises InvalidRequest in the pause after a restart.
        """
        if self._settling.pauses(now):
            raise InvalidRequest("the tracker has just started and waits for its nodes to come back: try again soon")
        self._sync()
        return self._with_directives(self._placing.rebalance(self._models, now), now)

    def room(self, node_id: str) -> tuple[int, int, int | None]:
        """As Placing.room. Raises Unregistered."""
        self.registry.silent_seconds(node_id, 0.0)
        self._sync()
        return self._placing.room(node_id)

    # Inside

    @property
    def _models(self) -> dict[str, DeployedModel]:
        return self._deployments.models

    def _deploy(self, model: DeployedModel) -> None:
        self._deployments.check_room(model, self._held_models())
        self._deployments.put(model)

    def _heard(self, member: Member, now: float) -> bool:
        was_suspect = self.registry.renew(member, now)
        if was_suspect:
            self._note(f"node {member.node.node_id} is heard again")
        return was_suspect

    def _held_models(self) -> set[str]:
        return {shard.model_id for node in self.topology.nodes.values() for shard in node.shards}

    def _forget(self, node_id: str, why: str) -> None:
        self._placing.forget(node_id, why)
        self.registry.draining.discard(node_id)
        self._reported_at.pop(node_id, None)
        self._unplanned.add(node_id)

    def _replan(self, now: float) -> Effects:
        if self._settling.pauses(now):
            return self._publish(now)
        if self._settling.placed():
            self._note("the nodes had time to come back: placing begins")
        self._sync()
        return self._with_directives(self._placing.replan(self._models, now), now)

    def _with_directives(self, issued: tuple[Directive, ...], now: float) -> Effects:
        return replace(self._publish(now), directives=issued)

    def _sync(self) -> None:
        """Tells the planner of all that has changed since it was last told."""
        self._collect()
        changed, self._unplanned = self._unplanned, set()
        for node_id in sorted(changed):
            self._placing.set_node(node_id, self.registry.node(node_id))

    def _collect(self) -> None:
        changed = self.registry.changed | self.ledger.changed
        self.registry.changed.clear()
        self.ledger.changed.clear()
        self._unplanned |= changed
        self._unpublished |= changed

    def _publish(self, now: float) -> Effects:
        """A new snapshot, if anything in it has changed."""
        self._collect()
        changed, self._unpublished = self._unpublished, set()
        topology_changed = self._publisher.publish({i: self._published(i) for i in changed}, self._models)
        saves = [*self._saves, *self._deployments.saves, *self._publisher.saves(sorted(changed))]
        if not self._settling.pauses(now):
            # The first time after a pause: also those that did not come back.
            saves += self._publisher.forgets(changed if self._has_forgotten else None)
            self._has_forgotten = True
            if self.registry.draining:
                self.registry.draining &= self.topology.nodes.keys()
        notes = [*self._notes, *self._deployments.notes, *self._placing.notes, *self._publisher.news()]
        for taken in (self._notes, self._deployments.notes, self._placing.notes):
            taken.clear()
        for taken_saves in (self._saves, self._deployments.saves):
            taken_saves.clear()
        return Effects(topology_changed=topology_changed, notes=tuple(notes), saves=tuple(saves))

    def _published(self, node_id: str) -> Node | None:
        node = self.registry.node(node_id)
        return published(node, self.ledger.open(node_id), self.registry.manifests) if node else None

    def _sources(self, node: Node, manifests: Sequence[ModelManifest]) -> set[str]:
        """Models that others can fetch from the node."""
        return {m.model_id for m in manifests if not node.stub and self.registry.is_served(m)}

    def _note(self, text: str, level: int = logging.INFO) -> None:
        self._notes.append(Note(text, level))
