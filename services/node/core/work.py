"""What the event loop hands to the thread that owns the weights, and what an executor must be able to do.

Tensors cross this line as raw bfloat16 buffers, as they came off the wire, so that nothing but an executor knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshnet.logprobs import TokenLogprobs
from meshnet.model import KvPrecision, LayerRange, ModelManifest, Quantization
from services.node.core.choices import ANYWHERE, Choice, Place

Buffer = bytes | bytearray | memoryview


def rows_of(buffer: Buffer, count: int) -> list[Buffer]:
    """So many rows of equal length, as bytes, without a copy."""
    whole = memoryview(buffer).cast("B")
    size = whole.nbytes // count
    return [whole[index * size : (index + 1) * size] for index in range(count)]


@dataclass(frozen=True, slots=True)
class SessionKey:
    """One KV cache. A route may visit a node twice, so the layers are part of the key."""

    session: str
    model_id: str
    layers: LayerRange

    def __hash__(self) -> int:
        """Of what tells almost all apart: keys are looked up dozens of times a frame."""
        return hash(self.session)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one session in a step.

    `position` tokens are in the session's KV cache before it (a longer cache is cut back to that first).
    The last `num_returned` of the `num_tokens` positions are wanted back.
    """

    key: SessionKey
    position: int
    num_tokens: int
    num_returned: int


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """Run `layers` over hidden states. All segments have the same model and layers.

    `hidden`: bfloat16 `[sum of num_tokens, hidden_size]`, row-major, little-endian.
    Result: bfloat16 `[sum of num_returned, hidden_size]` as a buffer.
    """

    model_id: str
    layers: LayerRange
    segments: tuple[Segment, ...]
    hidden: Buffer

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Embed token ids, then run `layers`, which start at 0. Result as for ForwardWork."""

    model_id: str
    layers: LayerRange
    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 keep all tokens.

    The penalties change logits of tokens that are in the text: `presence_penalty` and `frequency_penalty` (0 changes
    nothing) of what was generated, `repetition_penalty` (1 changes nothing) also of the prompt. `logit_bias`: what is
    added to logits, by token id.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether it matters what is in the text."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class SampleWork:
    """Final norm, LM head and the choice of one token. Result: a Choice.

    `hidden`: bfloat16 `[hidden_size]`, the last layer's output. `uniform` in [0, 1) makes the draw: randomness
    is the caller's, so that a seed gives the same text whatever else is in the batch. `top_logprobs`: of how many of
    the likeliest tokens logprobs are wanted beside those of the chosen one; None: of none at all.
    """

    model_id: str
    hidden: Buffer
    sampling: Sampling
    uniform: float
    place: Place = ANYWHERE
    top_logprobs: int | None = None

    @property
    def num_tokens(self) -> int:
        return 1

    @property
    def takes_largest(self) -> bool:
        """Whether nothing but the largest logit matters."""
        sampling = self.sampling
        return not (sampling.temperature or sampling.logit_bias or self.top_logprobs is not None) and self.place.is_free


# Rows of a ScoreWork: so few that others hardly wait for it, and that there is room for their logits.
SCORED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """Final norm, LM head and the logprobs of tokens that are known. Result: a tuple of TokenLogprobs, one each.

    `hidden`: bfloat16 `[targets, hidden_size]`, the last layer's output behind the token before each of `targets`, of
    which there are at most SCORED_TOKENS. `top_logprobs`: as many of the likeliest tokens are told of beside it.
    """

    model_id: str
    hidden: Buffer
    targets: tuple[int, ...]
    top_logprobs: int

    @property
    def num_tokens(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True)
class FreeWork:
    """Free the KV caches of these keys. Unknown keys are not an error. Result: None."""

    keys: tuple[SessionKey, ...]

    @property
    def num_tokens(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class KeepWork:
    """Cut a KV cache back to `num_kept` tokens, whole blocks, and give the rest of its memory back. Result: None."""

    key: SessionKey
    num_kept: int

    @property
    def num_tokens(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class ReuseWork:
    """Begin the KV cache of `target`, which has none, with the first tokens, whole blocks, of that of `source`.

    `take`: the memory of `source` becomes that of `target`; otherwise it is copied. Result: None.
    """

    source: SessionKey
    target: SessionKey
    num_reused: int
    take: bool

    @property
    def num_tokens(self) -> int:
        return 0


# What is done with KV caches as wholes.
CacheWork = FreeWork | KeepWork | ReuseWork
Work = ForwardWork | PromptWork | SampleWork | ScoreWork | CacheWork
Result = Buffer | Choice | tuple[TokenLogprobs, ...] | None | Exception


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A shard to load. `kv_tokens`: tokens that its KV cache must have room for. `fetched`: folder of its weights where
    they are not the node's own files."""

    manifest: ModelManifest
    layers: LayerRange
    quantization: Quantization
    kv_tokens: int
    kv_precision: KvPrecision = KvPrecision.BFLOAT16
    fetched: Path | None = None

    @property
    def kv_bytes(self) -> int:
        """Its KV caches, as predicted."""
        return len(self.layers) * self.manifest.kv_bytes(self.kv_tokens, self.quantization, self.kv_precision)

    @property
    def shard_bytes(self) -> int:
        """Its weights and KV caches, as predicted."""
        return self.manifest.shard_bytes(self.layers, self.quantization, self.kv_tokens, self.kv_precision)


# Called with (weight bytes loaded, weight bytes in all) while a shard loads.
Progress = Callable[[int, int], None]


class LoadedShard(Protocol):
    """A shard whose weights are in memory, beside room for its KV caches, but which serves nothing yet."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that its weights take, as measured."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes that the memory for its KV caches takes, as measured."""
        ...


class Trial(Protocol):
    """One layer of a loaded shard, to be measured with KV caches of its own, in the thread that owns the weights."""

    def prefill(self) -> float:
        """Passes a chunk of a prompt through the layer. Returns tokens a second."""
        ...

    def decode(self) -> float:
        """Passes one token through the layer, behind a cached chunk. Returns tokens a second."""
        ...

    def workspace_bytes(self, kv_tokens: int, layer: int | None = None) -> int | None:
        """Most bytes that the largest step takes at once, beside weights and KV caches; None: this cannot be measured.

        There is room for `kv_tokens`, most of them in one session. `layer`: where to measure, default the first.
        """
        ...

    def close(self) -> None:
        """Frees what the trial took, and the shard if nobody else holds it."""
        ...


class Executor(Protocol):
    """Holds layers and runs them. `load` may run in any thread; what is said to serve or run only in the thread that
    owns the weights."""

    @property
    def machine(self) -> str:
        """What speeds depend on beside the model: device, threads, versions."""
        ...

    @property
    def busy_chunk_tokens(self) -> int:
        """How many tokens of a prompt go into a step of sessions that decode: they wait for it, on every hop."""
        ...

    def memory_free_bytes(self) -> int | None:
        """Memory of the device that nobody uses now. None: not known. From any thread."""
        ...

    def trial(self, shard: LoadedShard) -> Trial | None:
        """A trial of the first layer of a loaded shard. None: there is nothing to measure."""
        ...

    def load(self, spec: ShardSpec, progress: Progress) -> LoadedShard:
        """Takes the memory of a shard's KV caches and reads its weights. Raises LoadFailed with a reason for people."""
        ...

    def attach(self, shard: LoadedShard) -> None:
        """Begins to serve a loaded shard, beside those already served (a model's layers may come in pieces)."""
        ...

    def detach(self, model_id: str, layers: LayerRange) -> None:
        """Stops serving layers and frees their memory. KV caches that run through them are freed too."""
        ...

    def run(self, batch: Sequence[Work]) -> list[Result]:
        """One step: all works of a batch are of one kind, model and layer range. One result (or exception) each."""
        ...
