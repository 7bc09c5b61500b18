"""All KV caches of an executor, and the checks that a work must pass before it touches any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from meshnet.errors import InvalidRequest, KvFull, PositionMismatch
from meshnet.model import LayerRange
from services.node.core.work import Segment, SessionKey
from services.node.engine.kv_cache import KvCache
from services.node.engine.kv_pool import LayerPool
from services.node.engine.segments import CachedSegment


class KvCaches:
    """KV caches by key. One exists from a session's first step until it is freed.

    They take their blocks from the pools of the layers that are held, and give them back.
    """

    def __init__(self) -> None:
        self._caches: dict[SessionKey, KvCache] = {}
        self._pools: defaultdict[str, dict[int, LayerPool]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._caches)

    @property
    def allocated_bytes(self) -> int:
        """Of all pools, whatever of them is used."""
        return sum(pool.allocated_bytes for pools in self._pools.values() for pool in pools.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that sessions have taken, in all layers together."""
        return sum(cache.num_blocks for cache in self._caches.values())

    def add_layers(self, model_id: str, pools: Mapping[int, LayerPool]) -> None:
        self._pools[model_id].update(pools)

    def remove_layers(self, model_id: str, layers: LayerRange) -> None:
        """Frees the caches that run through any of these layers, and the layers' pools."""
        self.free([key for key in self._caches if key.model_id == model_id and key.layers.overlaps(layers)])
        for layer in layers.layers:
            self._pools[model_id].pop(layer, None)

    def free(self, keys: Iterable[SessionKey]) -> None:
        for key in keys:
            if cache := self._caches.pop(key, None):
                cache.release()

    def keep(self, key: SessionKey, num_tokens: int) -> None:
        """Cuts a cache back to whole blocks of tokens, and gives the rest of its room back. Unknown ones are no
        error."""
        if cache := self._caches.get(key):
            cache.shrink(num_tokens)

    def reuse(self, source: SessionKey, target: SessionKey, num_tokens: int, *, take: bool) -> None:
        """Begins a cache with the first tokens, whole blocks, of another one of the same model and layers, which ends
        if it is taken. Raises PositionMismatch if it does not have so many, KvFull; then there is no new one."""
        assert (source.model_id, source.layers) == (target.model_id, target.layers), "a cache is of one shard"
        self.free([target])
        if (cached := self.cached_length(source)) < num_tokens:
            self.free([source] if take else [])
            raise PositionMismatch(f"{cached} tokens of session {source.session} are kept here", cached)
        if take:
            self._caches[target] = self._caches.pop(source)
            self._caches[target].shrink(num_tokens)
            return
        cache = self._caches[target] = KvCache(target.layers, self._pools[target.model_id])
        try:
            cache.copy_from(self._caches[source], num_tokens)
        except KvFull:
            self.free([target])
            raise

    def cached_length(self, key: SessionKey) -> int:
        cache = self._caches.get(key)
        return 0 if cache is None else cache.length

    def reserve(self, lengths: Mapping[SessionKey, int]) -> None:
        """Makes room for so many tokens of each key, in all. Raises KvFull, and then has made no new cache."""
        made = [key for key in lengths if key not in self._caches]
        try:
            for key, num_tokens in lengths.items():
                if key not in self._caches:
                    self._caches[key] = KvCache(key.layers, self._pools[key.model_id])
                self._caches[key].reserve(num_tokens)
        except KvFull:
            self.free(made)
            raise

    def begin(self, key: SessionKey, position: int) -> KvCache:
        """The cache of a key that has room reserved, cut back to `position` if it is longer."""
        cache = self._caches[key]
        cache.truncate(min(position, cache.length))
        return cache

    def check_integrity(self) -> None:
        """Raises AssertionError if a block of any pool was lost, or is in two caches or in none."""
        for key, cache in self._caches.items():
            assert cache.layers == key.layers
            cache.check_integrity()
        for model_id, pools in self._pools.items():
            for layer, pool in pools.items():
                pool.regions.check_integrity()
                through = [c for key, c in self._caches.items() if key.model_id == model_id and layer in key.layers]
                taken = sum(cache.blocks_in(pool) for cache in through)
                free = pool.regions.num_free
                assert taken + free == pool.regions.num_blocks, (layer, taken, free, pool.regions.num_blocks)


class StepPlan:
    """What a step will do to the caches: segments are admitted one work at a time, then begun, then committed.

    Lengths count as if the works admitted before had run, so that two works of a step may continue one session.
    """

    def __init__(self, caches: KvCaches, model_id: str, layers: LayerRange, context_length: int) -> None:
        self._caches = caches
        self._model_id = model_id
        self._layers = layers
        self._context_length = context_length
        self._lengths: dict[SessionKey, int] = {}
        self._admitted: list[Segment] = []

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._admitted)

    def admit(self, segments: tuple[Segment, ...]) -> None:
        """Takes all segments of a work, with room for their tokens.

        Raises PositionMismatch, InvalidRequest or KvFull, and then has taken none.
        """
        lengths = dict(self._lengths)
        for segment in segments:
            self._check(segment)
            cached = lengths.get(segment.key, self._caches.cached_length(segment.key))
            if segment.position > cached:
                raise PositionMismatch(
                    f"session {segment.key.session} has {cached} tokens cached here, not {segment.position}", cached
                )
            lengths[segment.key] = segment.position + segment.num_tokens
        self._caches.reserve({segment.key: lengths[segment.key] for segment in segments})
        self._lengths = lengths
        self._admitted += segments

    def begin(self) -> tuple[CachedSegment, ...]:
        """Cuts the caches back, and gives the rows of the packed step to its segments, in order."""
        cached: list[CachedSegment] = []
        row = 0
        for segment in self._admitted:
            cache = self._caches.begin(segment.key, segment.position)
            cached.append(CachedSegment(row, row + segment.num_tokens, segment.position, cache))
            row += segment.num_tokens
        return tuple(cached)

    def commit(self, cached: Iterable[CachedSegment]) -> None:
        """All layers have run: the caches are as long as they were written."""
        for segment in cached:
            segment.cache.length = segment.position + segment.end - segment.start

    def _check(self, segment: Segment) -> None:
        if (segment.key.model_id, segment.key.layers) != (self._model_id, self._layers):
            raise InvalidRequest("a segment's session is of another model or other layers than its work")
        if segment.num_tokens < 1 or segment.position < 0 or not 0 <= segment.num_returned <= segment.num_tokens:
            raise InvalidRequest(
                f"a segment of {segment.num_tokens} tokens at position {segment.position} "
                f"with {segment.num_returned} returned is impossible"
            )
        if segment.position + segment.num_tokens > self._context_length:
            raise InvalidRequest(
                f"position {segment.position + segment.num_tokens} is beyond the model's context "
                f"of {self._context_length} tokens"
            )
