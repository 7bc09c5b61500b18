"""One layer on trial: what a step through it takes of time and memory, with the kernels that serve."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch

from meshnet.errors import NoRoom
from meshnet.model import LayerRange, blocks_for
from services.node.core.batching import TOKEN_BUDGET
from services.node.core.speeds import PREFILL_TOKENS
from services.node.engine.device import is_out_of_memory, peak_bytes
from services.node.engine.held_model import HeldModel
from services.node.engine.kv_cache import KvCache
from services.node.engine.segments import CachedSegment
from services.node.engine.shard import TorchShard


class LayerTrial:
    """services.node.core.work.Trial of the first layer of a shard. Its input is random: speed is not in the values."""

    def __init__(self, shard: TorchShard, device: torch.device) -> None:
        self._device = device
        self._layers = LayerRange(shard.range.start, shard.range.start + 1)
        self._model = HeldModel(shard)
        self._model.attach(shard)
        self._entry = shard.entry
        self._context_length = shard.context_length
        self._chunk = max(1, min(PREFILL_TOKENS, shard.context_length // 2))
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, max(TOKEN_BUDGET, self._chunk), shard.hidden_size, generator=generator)
        self._hidden = hidden.to(device, torch.bfloat16)
        self._kv = shard.kv
        self._cache: KvCache | None = None

    @torch.inference_mode()
    def prefill(self) -> float:
        return self._chunk / self._time(CachedSegment(0, self._chunk, 0, self._warm_cache()))

    @torch.inference_mode()
    def decode(self) -> float:
        return 1 / self._time(CachedSegment(0, 1, self._chunk, self._warm_cache()))

    @torch.inference_mode()
    def workspace_bytes(self, kv_tokens: int, layer: int | None = None) -> int | None:
        """The largest step: as many chunks as are batched, one of them at the end of a long session. With the entry
        weights also the logits of as many sessions as have room. Raises NoRoom if it takes more than there is."""
        if layer is not None:
            self._layers, self._cache = LayerRange(layer, layer + 1), None
        try:
            entry_bytes = self._entry_bytes(min(blocks_for(kv_tokens), TOKEN_BUDGET))
            layer_bytes = self._layer_bytes(min(kv_tokens, self._context_length))
        except Exception as error:
            if is_out_of_memory(error):
                raise NoRoom("out of memory in the largest step through one layer") from error
            raise
        return None if entry_bytes is None or layer_bytes is None else max(entry_bytes, layer_bytes)

    def close(self) -> None:
        self._model.detach(self._layers)
        self._entry = None
        self._cache, self._kv = None, {}
        # Quantized layers refer to themselves in circles.
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _layer_bytes(self, cached_tokens: int) -> int | None:
        ends = range(self._chunk, TOKEN_BUDGET + 1, self._chunk)
        last = max(cached_tokens - self._chunk, 0)
        caches = self._new_caches([last + self._chunk, *[self._chunk] * (len(ends) - 1)])
        segments = [
            CachedSegment(end - self._chunk, end, 0 if index else last, cache)
            for index, (end, cache) in enumerate(zip(ends, caches, strict=True))
        ]
        return peak_bytes(self._device, lambda: self._run(segments))

    def _warm_cache(self) -> KvCache:
        """One that has a chunk cached and room for a token behind it."""
        if self._cache is None:
            (self._cache,) = self._new_caches([self._chunk + 1])
            self._run([CachedSegment(0, self._chunk, 0, self._cache)])
        return self._cache

    def _new_caches(self, lengths: Sequence[int]) -> list[KvCache]:
        """With room for so many tokens each, in memory of their own."""
        layer = self._layers.start
        pools = {layer: self._kv[layer].empty_like(sum(map(blocks_for, lengths)))}
        caches = [KvCache(self._layers, pools) for _ in lengths]
        for cache, length in zip(caches, lengths, strict=True):
            cache.reserve(length)
        return caches

    def _entry_bytes(self, rows: int) -> int | None:
        entry = self._entry
        if entry is None:
            return 0
        hidden = self._hidden[0, : max(rows, 1)]
        return peak_bytes(self._device, lambda: entry.logits(hidden)[0].float())

    def _time(self, segment: CachedSegment) -> float:
        """Seconds that a step of one segment takes."""
        self._synchronize()
        started = time.perf_counter()
        self._run([segment])
        self._synchronize()
        return time.perf_counter() - started

    def _run(self, segments: Sequence[CachedSegment]) -> None:
        positions = [torch.arange(s.position, s.position + s.end - s.start) for s in segments]
        position_ids = torch.cat(positions)[None].to(self._device)
        self._model.forward(self._layers, self._hidden[:, : segments[-1].end], position_ids, segments)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
