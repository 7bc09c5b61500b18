"""Obeys directives, one after the other, while the node goes on serving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.errors import BadFiles, MeshnetError, NoRoom, NoSource
from meshnet.model import LayerRange, ModelManifest, merge_layers
from meshnet.sizes import format_size
from services.node.config import NodeConfig
from services.node.core.work import ShardSpec
from services.node.fetching.mesh_weights import MeshWeights
from services.node.forwarding import Forwarding
from services.node.shard_loader import ShardLoader

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.5
MAX_REMEMBERED = 1000
GIVEN_UP = (
    "they computed what is not finite for several sessions; check the memory and the weight files of this machine, and "
    "start the node again"
)


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """A model whose layers here compute nonsense."""

    model_id: str


Report = Callable[[Directive], Awaitable[None]]


class DirectiveWorker:
    """`manifests` and `mesh_weights` are as for ShardLoader; `report` brings a directive's new state to the tracker.
    `loads` is held while a shard is loaded; `on_change` is called when layers are gone that nobody said to drop.
    """

    def __init__(
        self,
        config: NodeConfig,
        manifests: dict[str, ModelManifest],
        forwarding: Forwarding,
        report: Report,
        loads: asyncio.Lock,
        mesh_weights: MeshWeights | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_change = on_change
        self._drain_timeout = config.drain_timeout
        self._forwarding = forwarding
        self._report = report
        self._loads = loads
        self._loader = ShardLoader(config, manifests, forwarding, mesh_weights)
        self._plan_version = 0
        self._queue: asyncio.Queue[Directive | _GivenUp] = asyncio.Queue()
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
        waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for item in waiting:
            if isinstance(item, _GivenUp):
                self._queue.put_nowait(item)
        self._known = {i: d for i, d in self._known.items() if d.state.is_final or i == self._begun}
        self._plan_version = max((d.plan_version for d in self._known.values()), default=0)
        self._forwarding.changes.announce()

    def give_up(self, model_id: str) -> None:
        """Its layers here are served no more, and it is not loaded again while this process lives."""
        self._queue.put_nowait(_GivenUp(model_id))

    async def run(self) -> None:
        """Works through the queue for ever."""
        while True:
            directive = await self._queue.get()
            if isinstance(directive, _GivenUp):
                await self._give_up(directive.model_id)
                continue
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
        spec = await self._loader.spec(directive)
        shards, runner = self._forwarding.shards, self._forwarding.runner
        shards.set_loading(spec, 0, spec.manifest.weight_bytes(spec.layers, spec.quantization))
        started = time.monotonic()
        try:
            loop, done = asyncio.get_running_loop(), asyncio.Event()
            reporter = asyncio.create_task(self._report_progress(directive, spec, done))

            def progress(bytes_done: int, bytes_total: int) -> None:
                loop.call_soon_threadsafe(shards.set_loading, spec, bytes_done, bytes_total)

            try:
                loaded = await self._loader.load(spec, progress)
                # Of layers that are replaced nothing can be used again.
                self._forwarding.give_up_kept(directive.model_id, spec.layers)
                await runner.call(lambda: runner.executor.attach(loaded.shard))
            finally:
                done.set()
                await reporter
        finally:
            shards.loading_ended(spec)
        # What has been kept meanwhile was attached over.
        self._forwarding.give_up_kept(directive.model_id, spec.layers)
        self._forwarding.sessions.ledger(directive.model_id).add_layers(spec.layers, spec.kv_tokens)
        shards.add(loaded.spec, loaded.workspace_bytes)
        self._forwarding.changes.announce()
        size, took = loaded.shard.weight_bytes, time.monotonic() - started
        log.info("serving layers %s of %s: %s in %.1f s", spec.layers, directive.model_id, format_size(size), took)
        current = self._known[directive.directive_id]
        await self._advance(current, DirectiveState.READY, bytes_done=size, bytes_total=size)

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

        await self._forwarding.changes.wait_until(is_free, self._drain_timeout)

    async def _drop(self, directive: Directive) -> None:
        await self._detach(directive.model_id, directive.layers)
        await self._advance(self._known[directive.directive_id], DirectiveState.DROPPED)

    async def _detach(self, model_id: str, layers: LayerRange) -> None:
        forwarding = self._forwarding
        forwarding.shards.remove(model_id, layers)
        forwarding.close(forwarding.sessions.keys_through(model_id, layers))
        forwarding.give_up_kept(model_id, layers)
        forwarding.sessions.ledger(model_id).remove_layers(layers)
        await forwarding.runner.call(lambda: forwarding.runner.executor.detach(model_id, layers))

    async def _give_up(self, model_id: str) -> None:
        log.error("layers of %s are given up: %s", model_id, GIVEN_UP)
        self._loader.refuse(model_id, GIVEN_UP)
        for layers in merge_layers(self._forwarding.shards.layers(model_id)):
            try:
                await self._detach(model_id, layers)
            except Exception:
                log.exception("layers %s of %s are not freed", layers, model_id)
        self._on_change()

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
