"""Models of realistic shapes, from 1B to 72B parameters, some of them mixtures of experts with unequal layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshnet.model import LayerRange, ModelManifest, Quantization, WeightBytes
from meshnet.topology import DeployedModel

CONTEXT_LENGTH = 32_768
# Bytes a parameter, scales included.
PARAMETER_BYTES = {
    Quantization.BFLOAT16: 2.0,
    Quantization.INT8: 1.02,
    Quantization.NF4: 0.53,
    Quantization.FLOAT32: 4.0,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes in a model's configuration. With `experts`, layers from `first_moe` on have that many feed-forward
    networks of size `expert_size`, of which `active` run for each token."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    expert_size: int = 0
    active: int = 0
    first_moe: int = 0


# In an order in which the first few are a fair mix of sizes.
SHAPES = (
    Shape("llama-8b", 32, 4096, 14336, 8, 128, 128_256),
    Shape("llama-70b", 80, 8192, 28672, 8, 128, 128_256),
    Shape("qwen-1.5b", 28, 1536, 8960, 2, 128, 151_936, tied=True),
    Shape("qwen-32b", 64, 5120, 27648, 8, 128, 152_064),
    Shape("moe-30b-a3b", 48, 2048, 6144, 4, 128, 151_936, experts=128, expert_size=768, active=8),
    Shape("mistral-7b", 32, 4096, 14336, 8, 128, 32_000),
    Shape("gemma-27b", 46, 4608, 36864, 16, 128, 256_000, tied=True),
    Shape("llama-1b", 16, 2048, 8192, 8, 64, 128_256, tied=True),
    Shape("qwen-14b", 48, 5120, 13824, 8, 128, 152_064),
    Shape("moe-16b-a2b", 27, 2048, 10944, 16, 128, 102_400, experts=64, expert_size=1408, active=6, first_moe=1),
    Shape("llama-3b", 28, 3072, 8192, 8, 128, 128_256, tied=True),
    Shape("qwen-72b", 80, 8192, 29568, 8, 128, 152_064),
    Shape("mixtral-8x7b", 32, 4096, 14336, 8, 128, 32_000, experts=8, expert_size=14336, active=2),
    Shape("qwen-4b", 36, 2560, 9728, 8, 128, 151_936, tied=True),
    Shape("mistral-24b", 40, 5120, 32768, 8, 128, 131_072),
    Shape("gemma-9b", 42, 3584, 14336, 8, 256, 256_000, tied=True),
    Shape("phi-14b", 40, 5120, 17920, 10, 128, 32_064),
)


def model_ids(count: int) -> tuple[str, ...]:
    """The shapes again and again, as if each were another training of it."""
    return tuple(f"{SHAPES[index % len(SHAPES)].name}-v{1 + index // len(SHAPES)}" for index in range(count))


def manifests(count: int, scale: float = 1.0) -> tuple[ModelManifest, ...]:
    """`scale` multiplies all weights."""
    return tuple(manifest_of(SHAPES[i % len(SHAPES)], name, scale) for i, name in enumerate(model_ids(count)))


def manifest_of(shape: Shape, model_id: str, scale: float = 1.0) -> ModelManifest:
    attention = 2 * shape.hidden * shape.hidden + 2 * shape.hidden * shape.kv_heads * shape.head_size
    dense = _weights(scale * (attention + 3 * shape.hidden * shape.feed_forward))
    sparse = _weights(scale * (attention + 3 * shape.hidden * shape.expert_size * shape.experts))
    embedding = scale * shape.vocabulary * shape.hidden
    head = _weights(0 if shape.tied else embedding)
    unquantized = int(embedding * PARAMETER_BYTES[Quantization.BFLOAT16])
    return ModelManifest(
        model_id=model_id,
        revision="r1",
        architecture=shape.name,
        hidden_size=shape.hidden,
        vocab_size=shape.vocabulary,
        context_length=CONTEXT_LENGTH,
        layers=tuple(sparse if shape.experts and i >= shape.first_moe else dense for i in range(shape.layers)),
        entry=WeightBytes(*(head.at(q) + unquantized for q in PARAMETER_BYTES)),
        kv_bytes_per_token=4 * shape.kv_heads * shape.head_size,
    )


def active_share(architecture: str) -> float:
    """Which share of a layer's weights is read for one token."""
    shape = next(s for s in SHAPES if s.name == architecture)
    if not shape.experts:
        return 1.0
    attention = 2 * shape.hidden * shape.hidden + 2 * shape.hidden * shape.kv_heads * shape.head_size
    expert = 3 * shape.hidden * shape.expert_size
    return (attention + shape.active * expert) / (attention + shape.experts * expert)


def _weights(parameters: float) -> WeightBytes:
    return WeightBytes(*(int(parameters * size) for size in PARAMETER_BYTES.values()))


class Sizes:
    """What the layers of one deployed model take, in bytes by layer: `weights`, and `room` with KV cache.

    Layer 0 also pays for the entry weights.
    """

    def __init__(self, model: DeployedModel) -> None:
        self.model = model
        manifest = model.manifest
        layers = [LayerRange(layer, layer + 1) for layer in range(manifest.num_layers)]
        self.weights = {q: [manifest.weight_bytes(layer, q) for layer in layers] for q in Quantization}
        self.room = {q: [manifest.shard_bytes(layer, q, model.kv_tokens) for layer in layers] for q in Quantization}
        self.active_share = active_share(manifest.architecture)

    @cached_property
    def model_id(self) -> str:
        return self.model.model_id

    @cached_property
    def num_layers(self) -> int:
        return self.model.manifest.num_layers

    def total(self, quantization: Quantization) -> int:
        return sum(self.room[quantization])


Catalogue = dict[str, Sizes]


def catalogue(count: int, capacity_bytes: int, copies: float, most_kv_tokens: int) -> Catalogue:
    """Deployed models with KV cache room such that `copies` copies of all fill `capacity_bytes`, as far as
    `most_kv_tokens` allows. Where weights alone would fill more than half of it, all weights are scaled down to that.
    Nobody's quantization is known here: int8 stands for the mix of them."""
    capacity = capacity_bytes / copies
    full_size = manifests(count)
    weights = sum(m.weight_bytes(m.all_layers, Quantization.INT8) for m in full_size)
    a_token = sum(m.num_layers * m.kv_bytes_per_token for m in full_size)
    scale = min(1.0, capacity / 2 / weights)
    kv_tokens = int((capacity - scale * weights) / a_token)
    kv_tokens = min(most_kv_tokens, kv_tokens if kv_tokens < 1024 else kv_tokens // 1024 * 1024)
    models = (DeployedModel(m, kv_tokens, priority=index % 3) for index, m in enumerate(manifests(count, scale)))
    return {model.model_id: Sizes(model) for model in models}
