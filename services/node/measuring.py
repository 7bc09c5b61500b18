"""Measures how fast this node is: from its cache, by one layer of each model, and by the steps that really run."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from meshnet.errors import LoadFailed
from meshnet.model import LayerRange, ModelManifest, Quantization
from meshnet.sizes import format_size
from meshnet.topology import Speed
from services.node.config import NodeConfig
from services.node.core.shards import ShardTable
from services.node.core.speeds import PREFILL_TOKENS, SpeedTable, time_step
from services.node.core.work import ShardSpec, Trial, Work
from services.node.core.workspace import predict_workspace_bytes
from services.node.runner import Runner
from services.node.speed_cache import SpeedCache

log = logging.getLogger(__name__)

# Loading the layer may take this long, and each of the two speeds; a load that is told meanwhile waits as long.
LOAD_SECONDS = 8.0
PASS_SECONDS = 1.0
# The first directives arrive just after the node has joined, and the fallbacks must not be in their way.
FALLBACK_DELAY_SECONDS = 5.0
PREFILL_REPEATS = 5
DECODE_REPEATS = 21
# Layers that are larger in bfloat16 are measured at the preferred quantization only.
CHEAP_LAYER_BYTES = 256 << 20


class Measuring:
    """`loads` is held while a layer is on trial, so that no shard is loaded beside it. `on_news` is called when what
    `speeds` returns has changed by much."""

    def __init__(
        self,
        config: NodeConfig,
        manifests: dict[str, ModelManifest],
        runner: Runner,
        shards: ShardTable,
        loads: asyncio.Lock,
        on_news: Callable[[], None],
    ) -> None:
        self._config = config
        self._manifests = manifests
        self._runner = runner
        self._shards = shards
        self._loads = loads
        self._on_news = on_news
        self._cache = SpeedCache(config.cache_dir, runner.executor.machine)
        self._table = SpeedTable()
        self._missing = [] if config.stub else list(self._read_cache())
        self._table.take_news()
        self._stopping = False

    def speeds(self) -> tuple[Speed, ...]:
        return self._table.speeds()

    def observe(self, works: Sequence[Work], seconds: float) -> None:
        """Works have run as one step."""
        step = None if self._config.stub else time_step(works, seconds)
        quantization = self._shards.quantization(step.model_id, step.layers) if step else None
        if step and quantization:
            self._table.add(step, quantization)
            self._tell()

    async def run(self) -> None:
        """Measures what the cache does not know; ends when it has tried all."""
        try:
            preferred = self._config.quantization
            await self._measure_all([spec for spec in self._missing if spec.quantization is preferred])
            if fallbacks := [spec for spec in self._missing if spec.quantization is not preferred]:
                await asyncio.sleep(FALLBACK_DELAY_SECONDS)
                await self._measure_all(fallbacks)
        finally:
            self._stopping = True

    async def _measure_all(self, specs: Sequence[ShardSpec]) -> None:
        for spec in specs:
            async with self._loads:
                await self._measure(spec)

    def _read_cache(self) -> Iterator[ShardSpec]:
        """Takes what the cache knows. Yields the layers to be measured."""
        for quantization in (self._config.quantization, *self._config.fallbacks):
            for manifest in self._manifests.values():
                if speed := self._cache.get(manifest, quantization):
                    self._table.set_measured(speed)
                elif quantization is self._config.quantization or _is_cheap(manifest):
                    yield _middle_layer(manifest, quantization)

    async def _measure(self, spec: ShardSpec) -> None:
        """Never raises: a node that cannot measure itself serves all the same."""
        manifest, quantization = spec.manifest, spec.quantization
        if refusal := self._refusal(spec):
            log.info("%s is not measured at %s: %s", manifest.model_id, quantization, refusal)
            return
        log.info("measuring layer %d of %s at %s", spec.layers.start, manifest.model_id, quantization)
        started = time.monotonic()
        try:
            speed = await self._try(spec)
        except LoadFailed as error:
            log.warning("%s is not measured at %s: %s", manifest.model_id, quantization, error)
        except Exception:
            log.exception("%s could not be measured at %s", manifest.model_id, quantization)
        else:
            if speed:
                log.info("%s in %.1f s", _said(speed), time.monotonic() - started)
                self._table.set_measured(speed)
                self._cache.put(manifest, speed)
                self._tell()

    def _refusal(self, spec: ShardSpec) -> str:
        """Why there is no room for a trial; empty if there is."""
        needed = spec.shard_bytes
        needed += predict_workspace_bytes(
            spec.manifest, spec.quantization, spec.kv_tokens, entry=False, layers=spec.layers
        )
        free = self._config.vram_bytes - self._shards.held_bytes()
        on_device = self._runner.executor.memory_free_bytes()
        free = free if on_device is None else min(free, on_device)
        return f"one layer needs {format_size(needed)}, {format_size(free)} are free" if needed > free else ""

    async def _try(self, spec: ShardSpec) -> Speed | None:
        executor, deadline = self._runner.executor, time.monotonic() + LOAD_SECONDS

        def progress(bytes_done: int, bytes_total: int) -> None:
            if self._stopping or time.monotonic() > deadline:
                raise LoadFailed(f"the layer did not load within {LOAD_SECONDS:g} s")

        # No name here holds the shard, so that closing the trial frees it.
        trial = executor.trial(await asyncio.to_thread(executor.load, spec, progress))
        if trial is None:
            return None
        try:
            prefill = await self._repeat(trial.prefill, PREFILL_REPEATS)
            decode = await self._repeat(trial.decode, DECODE_REPEATS)
        finally:
            await self._close(trial)
        return Speed(spec.manifest.model_id, spec.quantization, prefill, decode)

    async def _repeat(self, one_pass: Callable[[], float], times: int) -> float:
        """The median, without the first pass, which also warms up; that one alone where it was all there is time for.

        Between two passes the sessions that are served have their turn.
        """
        deadline = time.monotonic() + PASS_SECONDS
        rates: list[float] = [await self._runner.call(one_pass)]
        while len(rates) <= times and time.monotonic() < deadline:
            rates.append(await self._runner.call(one_pass))
        return statistics.median(rates[1:] or rates)

    async def _close(self, trial: Trial) -> None:
        await self._runner.call(trial.close)

    def _tell(self) -> None:
        if self._table.take_news():
            self._on_news()


def _middle_layer(manifest: ModelManifest, quantization: Quantization) -> ShardSpec:
    """With KV room for the chunk and the tokens behind it. Not layer 0, which brings the entry weights."""
    middle = manifest.num_layers // 2
    return ShardSpec(manifest, LayerRange(middle, middle + 1), quantization, kv_tokens=2 * PREFILL_TOKENS)


def _is_cheap(manifest: ModelManifest) -> bool:
    return max(layer.bfloat16 for layer in manifest.layers) <= CHEAP_LAYER_BYTES


def _said(speed: Speed) -> str:
    return (
        f"one layer of {speed.model_id} at {speed.quantization} passes {speed.decode_tokens_per_second:.0f} tokens/s "
        f"one by one, {speed.prefill_tokens_per_second:.0f} in chunks; measured"
    )
