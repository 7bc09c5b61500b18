"""A stub executor: no weights, no torch, zeros of the right shape. For meshes of many nodes on a small machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.errors import WrongLayers
from meshnet.model import LayerRange
from meshnet.wire import BYTES_PER_ELEMENT
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
    ShardSpec,
    Work,
)


@dataclass(frozen=True, slots=True)
class StubShard:
    spec: ShardSpec
    weight_bytes: int = 0
    kv_bytes: int = 0


class StubExecutor:
    """Answers every frame with zeros and every draw with token 0, whatever comes in."""

    def __init__(self) -> None:
        self._hidden_sizes: dict[str, int] = {}

    @property
    def machine(self) -> str:
        return "stub"

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
                return 0
            case FreeWork() | KeepWork() | ReuseWork():
                return None
