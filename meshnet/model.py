"""What a model is to the mesh: its layers, what they weigh, and how a node may store them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from meshnet.errors import InvalidRequest

# What room in a KV cache is promised, taken and given back in.
BLOCK_TOKENS = 128

_KV_SCALE_BYTES = 2

MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def blocks_for(num_tokens: int) -> int:
    """Blocks of 128 tokens that hold this many."""
    return -(-num_tokens // BLOCK_TOKENS)


class Quantization(StrEnum):
    """How a node stores the weights of its shards. Activations are bfloat16 whatever this is."""

    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    NF4 = "nf4"
    FLOAT32 = "float32"


class KvPrecision(StrEnum):
    """How the KV caches of a deployed model are stored. BFLOAT16: as they are computed, as float32 in a float32 shard.
    INT8: with a scale in bfloat16 for each token and KV head, of keys and of values."""

    BFLOAT16 = "bfloat16"
    INT8 = "int8"


def parse_quantizations(text: str) -> tuple[Quantization, ...]:
    """From `bfloat16,int8` or `bfloat16+int8`, best first. Raises InvalidRequest for none, unknown ones and repeats."""
    names = [name.strip().lower() for name in re.split(r"[,+]", text)]
    known = {quantization.value: quantization for quantization in Quantization}
    if unknown := [name for name in names if name not in known]:
        raise InvalidRequest(f"{unknown[0]!r} is not a quantization: use {', '.join(known)}")
    if len(set(names)) < len(names):
        raise InvalidRequest(f"{text!r} names a quantization twice")
    return tuple(known[name] for name in names)


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers `[start, end)`, never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise InvalidRequest(f"layers {self.start}-{self.end} are not a range: 0 <= start < end must hold")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    def __contains__(self, other: object) -> bool:
        """Whether a layer, or all layers of another range, lie in this one."""
        if isinstance(other, LayerRange):
            return self.start <= other.start and other.end <= self.end
        return isinstance(other, int) and self.start <= other < self.end

    def overlaps(self, other: LayerRange) -> bool:
        return self.start < other.end and other.start < self.end

    @property
    def layers(self) -> range:
        return range(self.start, self.end)


def merge_layers(layers: set[int] | frozenset[int]) -> tuple[LayerRange, ...]:
    """The fewest ranges that hold exactly these layers, in order."""
    ranges: list[LayerRange] = []
    start: int | None = None
    for layer in sorted(layers):
        if start is None:
            start = layer
        if layer + 1 not in layers:
            ranges.append(LayerRange(start, layer + 1))
            start = None
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes that the same weights take at each quantization, scales included."""

    bfloat16: int
    int8: int
    nf4: int
    float32: int

    def at(self, quantization: Quantization) -> int:
        size: int = getattr(self, quantization.value)
        return size


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What a step through a layer holds at once. `values`: of activations, a token. `largest_linear`: weights of its
    largest linear layer. `score_heads`: heads whose attention scores are held in float32, 0 where no scores are held.
    `window`: tokens that each sees, None: all."""

    values: int
    largest_linear: int
    score_heads: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes that a node's largest step is predicted to take where there is KV room for so many tokens, by how the node
    stores weights. It is of any part of the model, the entry's too."""

    kv_tokens: int
    at_precision: WeightBytes


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """A model as the headers of its weight files describe it.

    `layers` has one entry a layer, in order. `entry` is what a shard that starts at layer 0 pays on top:
    embedding, final norm and LM head. `kv_bytes_per_token` is for one token in one layer, in bfloat16;
    `kv_scales_per_token` are the scales that it has at INT8: one for each KV head, of keys and of values. `steps` has
    one entry a layer too, and is known only where the weight files are: it does not travel. `workspaces` is what they
    come to, for a few numbers of tokens in rising order.
    """

    model_id: str
    revision: str
    architecture: str
    hidden_size: int
    vocab_size: int
    context_length: int
    layers: tuple[WeightBytes, ...]
    entry: WeightBytes
    kv_bytes_per_token: int
    kv_scales_per_token: int = 0
    steps: tuple[LayerStep, ...] = field(default=(), compare=False)
    workspaces: tuple[Workspace, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def all_layers(self) -> LayerRange:
        return LayerRange(0, self.num_layers)

    def weight_bytes(self, layers: LayerRange, quantization: Quantization) -> int:
        """Weight bytes of a shard, with the entry weights if it starts at layer 0."""
        size = sum(self.layers[layer].at(quantization) for layer in layers.layers)
        return size + (self.entry.at(quantization) if layers.start == 0 else 0)

    def workspace_bytes(self, quantization: Quantization, kv_tokens: int) -> int:
        """What steps are predicted to take of memory at most; 0: nobody has predicted it."""
        longest = min(kv_tokens, self.context_length)
        fitting = (workspace for workspace in self.workspaces if workspace.kv_tokens >= longest)
        workspace = next(fitting, self.workspaces[-1] if self.workspaces else None)
        return workspace.at_precision.at(quantization) if workspace else 0

    def kv_bytes(
        self, num_tokens: int, quantization: Quantization, precision: KvPrecision = KvPrecision.BFLOAT16
    ) -> int:
        """KV cache bytes of that many tokens in one layer."""
        if precision is KvPrecision.INT8:
            return num_tokens * (self.kv_bytes_per_token // 2 + _KV_SCALE_BYTES * self.kv_scales_per_token)
        return num_tokens * self.kv_bytes_per_token * (2 if quantization is Quantization.FLOAT32 else 1)

    def shard_bytes(
        self,
        layers: LayerRange,
        quantization: Quantization,
        kv_tokens: int,
        precision: KvPrecision = KvPrecision.BFLOAT16,
    ) -> int:
        """What a shard takes: its weights, and KV cache for `kv_tokens` tokens in each layer."""
        return self.weight_bytes(layers, quantization) + len(layers) * self.kv_bytes(kv_tokens, quantization, precision)


def check_model_id(model_id: str) -> str:
    """The id itself, if it is one: a plain name, never a path. Raises InvalidRequest."""
    if not MODEL_ID.fullmatch(model_id):
        raise InvalidRequest(
            f"{model_id!r} is not a model id: use up to 96 of A-Z a-z 0-9 . _ - and begin with a letter or digit"
        )
    return model_id
