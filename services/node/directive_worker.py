"""Obeys directives, one after the other, while the node goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from meshnet.directive import Directive, DirectiveKind, DirectiveState
from meshnet.errors import LoadFailed, MeshnetError
from meshnet.model import LayerRange, ModelManifest
from meshnet.sizes import format_size
from services.node.config import NodeConfig
from services.node.core.work import ShardSpec
from services.node.forwarding import Forwarding

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.5
MAX_REMEMBERED = 1000

Report = Callable[[Directive], Awaitable[None]]


class DirectiveWorker:
    """`manifests` are of the models whose files are here; `report` brings a directive's new state to the tracker."""

    def __init__(
        self, config: NodeConfig, manifests: dict[str, ModelManifest], forwarding: Forwarding, report: Report
    ) -> None:
        self._config = config
        self._manifests = manifests
        self._forwarding = forwarding
        self._report = report
        self._queue: asyncio.Queue[Directive] = asyncio.Queue()
        # A tracker that comes back sends its open directives again.
        self._known: dict[str, Directive] = {}

    async def accept(self, directive: Directive) -> None:
        """Queues a directive. One that is known already is only reported again."""
        known = self._known.get(directive.directive_id)
        if known:
            await self._report(known)
            return
        # Whatever the tracker believes of it, here it begins now.
        await self._advance(replace(directive, state=DirectiveState.PENDING), DirectiveState.ACCEPTED)
        self._queue.put_nowait(self._known[directive.directive_id])

    async def run(self) -> None:
        """Works through the queue for ever."""
        while True:
            directive = await self._queue.get()
            log.info("%s layers %s of %s: %s", directive.kind, directive.layers, directive.model_id, directive.reason)
            try:
                if directive.kind is DirectiveKind.LOAD_SHARD:
                    await self._load(directive)
                else:
                    await self._drop(directive)
            except Exception as error:
                if not isinstance(error, MeshnetError):
                    log.exception("directive %s failed", directive.directive_id)
                log.warning("%s layers %s failed: %s", directive.kind, directive.layers, error)
                current = self._known[directive.directive_id]
                await self._advance(current, DirectiveState.FAILED, failure=str(error) or type(error).__name__)

    async def _load(self, directive: Directive) -> None:
        spec = self._spec(directive)
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
                shard = await asyncio.to_thread(runner.executor.load, spec, progress)
                await runner.call(lambda: runner.executor.attach(shard))
            finally:
                done.set()
                await reporter
        finally:
            shards.loading_ended(spec)
        self._forwarding.sessions.ledger(directive.model_id).add_layers(spec.layers, spec.kv_tokens)
        shards.add(spec)
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

    def _spec(self, directive: Directive) -> ShardSpec:
        """What to load. Raises LoadFailed, before anything starts, if this node cannot do it."""
        manifest = self._manifests.get(directive.model_id)
        if manifest is None:
            raise LoadFailed(f"this node has no files of model {directive.model_id!r}: start it with --model ID=PATH")
        if directive.revision and directive.revision != manifest.revision:
            raise LoadFailed(
                f"this node's files of model {directive.model_id!r} are another revision: "
                f"{manifest.revision[:12]} here, {directive.revision[:12]} in the mesh"
            )
        if directive.layers not in manifest.all_layers:
            raise LoadFailed(f"model {directive.model_id!r} has {manifest.num_layers} layers, not {directive.layers}")
        held = self._forwarding.shards.layers(directive.model_id)
        if not held.isdisjoint(directive.layers.layers):
            raise LoadFailed(f"some of layers {directive.layers} are held here already")
        needed = manifest.shard_bytes(directive.layers, directive.quantization, directive.kv_tokens)
        free = self._config.vram_bytes - self._forwarding.shards.held_bytes()
        if needed > free:
            raise LoadFailed(
                f"layers {directive.layers} with KV cache need {format_size(needed)}, "
                f"{format_size(free)} of the {format_size(self._config.vram_bytes)} that this node lends are free"
            )
        return ShardSpec(manifest, directive.layers, directive.quantization, directive.kv_tokens)

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

    async def _drop(self, directive: Directive) -> None:
        forwarding = self._forwarding
        await forwarding.changes.wait_until(
            lambda: not forwarding.sessions.keys_through(directive.model_id, directive.layers) or None,
            self._config.drain_timeout,
        )
        await self._detach(directive.model_id, directive.layers)
        await self._advance(self._known[directive.directive_id], DirectiveState.DROPPED)

    async def _detach(self, model_id: str, layers: LayerRange) -> None:
        forwarding = self._forwarding
        forwarding.shards.remove(model_id, layers)
        forwarding.close(forwarding.sessions.keys_through(model_id, layers))
        forwarding.sessions.ledger(model_id).remove_layers(layers)
        await forwarding.runner.call(lambda: forwarding.runner.executor.detach(model_id, layers))

    async def _advance(
        self,
        directive: Directive,
        state: DirectiveState,
        *,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
        failure: str = "",
    ) -> None:
        advanced = directive.advance(state, bytes_done=bytes_done, bytes_total=bytes_total, failure=failure)
        self._known[directive.directive_id] = advanced
        while len(self._known) > MAX_REMEMBERED:
            self._known.pop(next(iter(self._known)))
        await self._report(advanced)
