"""A stub executor: no weights, no torch, zeros of the right shape. For meshes of many nodes on a small machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.errors import WrongLayers
from meshnet.logprobs import TokenLogprobs
from meshnet.model import LayerRange
from meshnet.wire import BYTES_PER_ELEMENT, Buffer
from services.node.core.batching import BLOCK_ROWS
from services.node.core.choices import Choice
from services.node.core.work import (
    ForwardWork,
    FreeWork,
    KeepWork,
    LoadedShard,
    Progress,
    PromptWork,
    Result,
    ReuseWork,
    SampleWork,
    ScoreWork,
    ShardSpec,
    Work,
)


@dataclass(frozen=True, slots=True)
class StubShard:
    spec: ShardSpec
    weight_bytes: int = 0
    kv_bytes: int = 0


class StubExecutor:
    """Answers every frame with zeros and every draw with token 0, or the first of a grammar, whatever comes in."""

    def __init__(self) -> None:
        self._hidden_sizes: dict[str, int] = {}

    @property
    def machine(self) -> str:
        return "stub"

    @property
    def busy_chunk_tokens(self) -> int:
        return BLOCK_ROWS

    def memory_free_bytes(self) -> None:
        """It takes none."""

    def trial(self, shard: LoadedShard) -> None:
        """There is nothing to measure."""

    def load(self, spec: ShardSpec, progress: Progress) -> StubShard:
        size = spec.manifest.weight_bytes(spec.layers, spec.quantization)
        progress(size, size)
        return StubShard(spec)

    def attach(self, shard: LoadedShard) -> None:
        assert isinstance(shard, StubShard)
        self._hidden_sizes[shard.spec.manifest.model_id] = shard.spec.manifest.hidden_size

    def detach(self, model_id: str, layers: LayerRange) -> None:
        """Nothing to free."""

    def run(self, batch: Sequence[Work]) -> list[Result]:
        return [self._answer(work) for work in batch]

    def _answer(self, work: Work) -> Result:
        match work:
            case ForwardWork() | PromptWork():
                if work.model_id not in self._hidden_sizes:
                    return WrongLayers(f"layers {work.layers} of {work.model_id!r} are not served here")
                positions = sum(segment.num_returned for segment in work.segments)
                return bytes(positions * self._hidden_sizes[work.model_id] * BYTES_PER_ELEMENT)
            case SampleWork():
                token = 0 if work.place.allowed is None else _first(work.place.allowed)
                return Choice(token, None if work.top_logprobs is None else _certain(token, work.top_logprobs))
            case ScoreWork():
                return tuple(_certain(target, work.top_logprobs) for target in work.targets)
            case FreeWork() | KeepWork() | ReuseWork():
                return None


def _certain(token: int, num_top: int) -> TokenLogprobs:
    """There is no other."""
    return TokenLogprobs(0.0, ((token, 0.0),) if num_top else ())


def _first(allowed: Buffer) -> int:
    bits = int.from_bytes(allowed, "little")
    return (bits & -bits).bit_length() - 1
