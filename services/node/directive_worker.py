"""Obeys directives, one after the other, while the node goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.errors import BadFiles, LoadFailed, MeshnetError, NoRoom, NoSource
from meshnet.model import LayerRange, ModelManifest
from meshnet.sizes import format_size
from services.node.config import NodeConfig
from services.node.core.room import Room, shortage
from services.node.core.work import LoadedShard, Progress, ShardSpec
from services.node.core.workspace import largest_step, predict_workspace_bytes
from services.node.fetching.mesh_weights import MeshWeights
from services.node.files.manifest import read_manifest
from services.node.forwarding import Forwarding

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.5
MAX_REMEMBERED = 1000
# A directive may come a moment before the topology that it follows from.
TOPOLOGY_SECONDS = 10.0

Report = Callable[[Directive], Awaitable[None]]


class DirectiveWorker:
    """`manifests` are of the models whose files are here, `mesh_weights` brings those of others; `report` brings a
    directive's new state to the tracker. `loads` is held while a shard is loaded.
    """

    def __init__(
        self,
        config: NodeConfig,
        manifests: dict[str, ModelManifest],
        forwarding: Forwarding,
        report: Report,
        loads: asyncio.Lock,
        mesh_weights: MeshWeights | None = None,
    ) -> None:
        self._config = config
        self._manifests = manifests
        self._forwarding = forwarding
        self._report = report
        self._loads = loads
        self._mesh_weights = mesh_weights
        self._plan_version = 0
        self._queue: asyncio.Queue[Directive] = asyncio.Queue()
        # A tracker that comes back sends its open directives again.
        self._known: dict[str, Directive] = {}
        # The one that is being done.
        self._begun: str | None = None

    async def accept(self, directive: Directive) -> None:
        """Queues a directive. One that is known already is only reported again; one of an older plan is refused."""
        known = self._known.get(directive.directive_id)
        if known:
            await self._report(known)
            return
        # Whatever the tracker believes of it, here it begins now.
        directive = replace(directive, state=DirectiveState.PENDING)
        if directive.plan_version < self._plan_version:
            failure = (
                f"it is of plan {directive.plan_version}, and this node has obeyed plan {self._plan_version} already"
            )
            log.warning("%s layers %s is refused: %s", directive.kind, directive.layers, failure)
            await self._fail(directive, failure, FailureKind.STALE_PLAN)
            return
        self._plan_version = directive.plan_version
        await self._advance(directive, DirectiveState.ACCEPTED)
        self._queue.put_nowait(self._known[directive.directive_id])

    def forget_waiting(self) -> None:
        """The tracker is out of reach: what has not begun is void. The same tracker sends it again when it is back;
        another one plans anew, and does not know of it."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._known = {i: d for i, d in self._known.items() if d.state.is_final or i == self._begun}
        self._plan_version = max((d.plan_version for d in self._known.values()), default=0)
        self._forwarding.changes.announce()

    async def run(self) -> None:
        """Works through the queue for ever."""
        while True:
            directive = await self._queue.get()
            try:
                if directive.kind is DirectiveKind.LOAD_SHARD:
                    async with self._loads:
                        if self._begin(directive):
                            await self._load(directive)
                else:
                    await self._wait_for_sessions(directive)
                    if self._begin(directive):
                        await self._drop(directive)
            except Exception as error:
                if not isinstance(error, MeshnetError):
                    log.exception("directive %s failed", directive.directive_id)
                log.warning("%s layers %s failed: %s", directive.kind, directive.layers, error)
                current = self._known.get(directive.directive_id, directive)
                await self._fail(current, str(error) or type(error).__name__, _failure_kind(error))
            finally:
                self._begun = None

    def _begin(self, directive: Directive) -> bool:
        """Whether it is still to be done."""
        if self._is_void(directive):
            return False
        log.info("%s layers %s of %s: %s", directive.kind, directive.layers, directive.model_id, directive.reason)
        self._begun = directive.directive_id
        return True

    def _is_void(self, directive: Directive) -> bool:
        """It has been forgotten, though it may have come again since."""
        return self._known.get(directive.directive_id) is not directive

    async def _load(self, directive: Directive) -> None:
        spec = self._spec(directive, await self._manifest(directive))
        shards, runner = self._forwarding.shards, self._forwarding.runner
        size = spec.manifest.weight_bytes(spec.layers, spec.quantization)
        shards.set_loading(spec, 0, size)
        try:
            loop, done = asyncio.get_running_loop(), asyncio.Event()
            reporter = asyncio.create_task(self._report_progress(directive, spec, done))

            def progress(bytes_done: int, bytes_total: int) -> None:
                loop.call_soon_threadsafe(shards.set_loading, spec, bytes_done, bytes_total)

            try:
                started = time.monotonic()
                spec, fetched_bytes = await asyncio.to_thread(self._bring, spec, progress)

                def load_progress(bytes_done: int, bytes_total: int) -> None:
                    progress(fetched_bytes + bytes_done, fetched_bytes + bytes_total)

                shard = await asyncio.to_thread(runner.executor.load, spec, load_progress)
                workspace_bytes = await self._measure_workspace(shard, spec)
                await runner.call(lambda: runner.executor.attach(shard))
            finally:
                done.set()
                await reporter
        finally:
            shards.loading_ended(spec)
        self._forwarding.sessions.ledger(directive.model_id).add_layers(spec.layers, spec.kv_tokens)
        shards.add(spec, workspace_bytes)
        self._forwarding.changes.announce()
        took = time.monotonic() - started
        log.info(
            "serving layers %s of %s: %s in %.1f s",
            spec.layers,
            directive.model_id,
            format_size(shard.weight_bytes),
            took,
        )
        current = self._known[directive.directive_id]
        await self._advance(
            current, DirectiveState.READY, bytes_done=shard.weight_bytes, bytes_total=shard.weight_bytes
        )

    async def _measure_workspace(self, shard: LoadedShard, spec: ShardSpec) -> int | None:
        """What the largest step takes beside weights and KV cache; a shard that has no room for it cannot serve."""
        runner, manifest = self._forwarding.runner, spec.manifest
        trial = runner.executor.trial(shard)
        if trial is None:
            return None
        layer = largest_step(manifest, spec.layers, spec.quantization, spec.kv_tokens)
        try:
            measured: int | None = await runner.call(lambda: trial.workspace_bytes(spec.kv_tokens, layer))
        finally:
            await runner.call(trial.close)
        predicted = _predicted_workspace(spec)
        log.info(
            "layers %s of %s take %s of weights (predicted %s), %s of KV cache (predicted %s), "
            "their steps %s of workspace (predicted %s)",
            spec.layers,
            manifest.model_id,
            format_size(shard.weight_bytes),
            format_size(manifest.weight_bytes(spec.layers, spec.quantization)),
            format_size(shard.kv_bytes),
            format_size(spec.kv_bytes),
            "an unknown number of bytes" if measured is None else format_size(measured),
            format_size(predicted),
        )
        return measured

    async def _manifest(self, directive: Directive) -> ModelManifest:
        """Of the model and revision that the directive means. Raises BadFiles if its weights cannot be had here."""
        own, revision = self._manifests.get(directive.model_id), directive.revision
        if own and revision in ("", own.revision):
            return own
        if weights := self._mesh_weights:
            served = await self._forwarding.changes.wait_until(
                lambda: weights.served(directive.model_id, revision), TOPOLOGY_SECONDS
            )
            if served is None:
                raise LoadFailed(f"the topology names no model {directive.model_id!r} of revision {revision[:12]}")
            return served
        if own is None:
            raise BadFiles(
                f"this node has no files of model {directive.model_id!r}: start it with --model ID=PATH, "
                "or without --no-fetch"
            )
        raise BadFiles(
            f"this node's files of model {directive.model_id!r} are another revision: "
            f"{own.revision[:12]} here, {revision[:12]} in the mesh"
        )

    def _bring(self, spec: ShardSpec, progress: Progress) -> tuple[ShardSpec, int]:
        """Makes sure that the shard's weights are on the disk. Returns what is to be loaded, and how many bytes of
        progress it took to bring it. Raises LoadFailed."""
        manifest = spec.manifest
        is_own = manifest == self._manifests.get(manifest.model_id)
        if is_own and (manifest.model_id in self._config.models or self._mesh_weights is None):
            self._check_files(manifest)
            return spec, 0
        assert self._mesh_weights, "the manifest is that of the files here, or of what the mesh serves"
        size, fetched_bytes = manifest.weight_bytes(spec.layers, spec.quantization), 0

        def fetch_progress(bytes_done: int, bytes_total: int) -> None:
            nonlocal fetched_bytes
            fetched_bytes = bytes_total
            progress(bytes_done, bytes_total + size)

        folder = self._mesh_weights.fetch(manifest, spec.layers, fetch_progress)
        return replace(spec, fetched=folder), fetched_bytes

    def _check_files(self, manifest: ModelManifest) -> None:
        """Files that were exchanged since the manifest was read would make layers of another model, silently. Raises
        BadFiles."""
        files = self._config.models.get(manifest.model_id)
        if files is None:
            return
        try:
            revision = read_manifest(files).revision
        except LoadFailed as error:
            raise BadFiles(str(error)) from error
        if revision != manifest.revision:
            raise BadFiles(f"the files of model {manifest.model_id!r} have changed since this node started: restart it")

    def _spec(self, directive: Directive, manifest: ModelManifest) -> ShardSpec:
        """What to load. Raises LoadFailed, before anything starts, if this node cannot do it."""
        if directive.layers not in manifest.all_layers:
            raise LoadFailed(f"model {directive.model_id!r} has {manifest.num_layers} layers, not {directive.layers}")
        config = self._config
        accepted = (config.quantization, *config.fallbacks)
        if directive.quantization not in accepted:
            raise LoadFailed(f"this node stores weights at {', '.join(accepted)}, not at {directive.quantization}")
        shards = self._forwarding.shards
        held = shards.layers(directive.model_id)
        if held and shards.manifest(directive.model_id).revision != manifest.revision:
            raise LoadFailed(f"layers of another revision of model {directive.model_id!r} are held here")
        if not held.isdisjoint(directive.layers.layers):
            raise LoadFailed(f"some of layers {directive.layers} are held here already")
        spec = ShardSpec(
            manifest, directive.layers, directive.quantization, directive.kv_tokens, directive.kv_precision
        )
        self._check_room(spec)
        return spec

    def _check_room(self, spec: ShardSpec) -> None:
        """Raises NoRoom if the shard is predicted to take more than is lent, or than is really free."""
        shards, executor = self._forwarding.shards, self._forwarding.runner.executor
        weights = spec.manifest.weight_bytes(spec.layers, spec.quantization)
        free = executor.memory_free_bytes()
        room = Room(self._config.vram_bytes, shards.held_bytes(), shards.workspace_bytes(), free)
        # A stub runs no steps.
        workspace = 0 if free is None else _predicted_workspace(spec)
        if short := shortage(room, weights, spec.kv_bytes, workspace):
            raise NoRoom(f"layers {spec.layers} of {spec.manifest.model_id} at {spec.quantization}: {short}")

    async def _report_progress(self, directive: Directive, spec: ShardSpec, done: asyncio.Event) -> None:
        while not done.is_set():
            loading = next(
                (
                    shard
                    for shard in self._forwarding.shards.listing()
                    if (shard.model_id, shard.layers) == (directive.model_id, spec.layers)
                ),
                None,
            )
            if loading:
                await self._advance(
                    self._known[directive.directive_id],
                    DirectiveState.LOADING,
                    bytes_done=loading.bytes_done,
                    bytes_total=loading.bytes_total,
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_SECONDS):
                    await done.wait()

    async def _wait_for_sessions(self, directive: Directive) -> None:
        """Until none passes the layers that are to be dropped, for at most as long as they may keep them."""
        sessions = self._forwarding.sessions

        def is_free() -> bool | None:
            return self._is_void(directive) or not sessions.keys_through(directive.model_id, directive.layers) or None

        await self._forwarding.changes.wait_until(is_free, self._config.drain_timeout)

    async def _drop(self, directive: Directive) -> None:
        await self._detach(directive.model_id, directive.layers)
        await self._advance(self._known[directive.directive_id], DirectiveState.DROPPED)

    async def _detach(self, model_id: str, layers: LayerRange) -> None:
        forwarding = self._forwarding
        forwarding.shards.remove(model_id, layers)
        forwarding.close(forwarding.sessions.keys_through(model_id, layers))
        forwarding.sessions.ledger(model_id).remove_layers(layers)
        await forwarding.runner.call(lambda: forwarding.runner.executor.detach(model_id, layers))

    async def _fail(self, directive: Directive, failure: str, kind: FailureKind) -> None:
        await self._publish(directive.advance(DirectiveState.FAILED, failure=failure, failure_kind=kind))

    async def _advance(
        self,
        directive: Directive,
        state: DirectiveState,
        *,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
    ) -> None:
        await self._publish(directive.advance(state, bytes_done=bytes_done, bytes_total=bytes_total))

    async def _publish(self, advanced: Directive) -> None:
        self._known[advanced.directive_id] = advanced
        while len(self._known) > MAX_REMEMBERED:
            self._known.pop(next(iter(self._known)))
        await self._report(advanced)


def _predicted_workspace(spec: ShardSpec) -> int:
    return predict_workspace_bytes(
        spec.manifest, spec.quantization, spec.kv_tokens, entry=spec.layers.start == 0, layers=spec.layers
    )


def _failure_kind(error: Exception) -> FailureKind:
    match error:
        case NoRoom() | MemoryError():
            return FailureKind.NO_ROOM
        case BadFiles():
            return FailureKind.BAD_FILES
        case NoSource():
            return FailureKind.NO_SOURCE
        case _:
            return FailureKind.OTHER
