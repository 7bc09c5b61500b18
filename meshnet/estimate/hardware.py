"""What a node computes with, and how long its stage of a route takes with it."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.chunks import CHUNK_TOKENS
from meshnet.estimate.curve import Curve
from meshnet.model import KvPrecision, LayerRange, ModelManifest, Quantization
from meshnet.topology import Speed

# A multiplication and an addition for each weight; and for each value of a key and of a value.
FLOPS_A_WEIGHT = 2
FLOPS_A_CACHED_VALUE = 4
BFLOAT16_BYTES = 2


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Seconds through one layer of a step of so many sessions (`decode`), or of a chunk of so many tokens; `cached`: on
    top for each session and token that it has cached. `head`: through norm, head and choice, for so many rows."""

    decode: Curve
    chunk: Curve
    head: Curve
    cached: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """`bytes_per_second`: of weights and KV caches that a step reads. `flops_per_second`: of a chunk of a prompt.
    `layer_seconds`: what a step takes for each layer on top of both. `measured`: instead of all that, where the very
    model was measured there."""

    bytes_per_second: float
    flops_per_second: float
    layer_seconds: float = 0.0
    measured: MeasuredSteps | None = None

    def speed(self, manifest: ModelManifest, quantization: Quantization) -> Speed:
        """What a node with it would measure of a layer of the model."""
        stage = make_stage(self, manifest, LayerRange(0, manifest.num_layers), quantization)
        layers = manifest.num_layers
        decode, prefill = layers / stage.decode.at(1), layers * CHUNK_TOKENS / stage.chunk.at(CHUNK_TOKENS)
        return Speed(manifest.model_id, quantization, prefill, decode)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What one node's layers take in a route. `decode` and `chunk` are seconds of a step of so many sessions, or of a
    chunk of so many tokens, with nothing cached. On top, for each session or token of the chunk and each token before
    it: `decode_cached` and `chunk_cached` seconds. `step_bytes`: weights that a step reads; `cached_bytes`: of a
    session, for each token that it has cached."""

    decode: Curve
    chunk: Curve
    decode_cached: float
    chunk_cached: float
    step_bytes: float
    cached_bytes: float


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """Norm, head and choice of tokens: seconds for so many rows, and the bytes that are read."""

    seconds: Curve
    step_bytes: float


def measured_hardware(speed: Speed, manifest: ModelManifest) -> Hardware:
    """From what a node has measured of one layer of the model. What it measured includes the cost of the layer."""
    weights = sum(layer.at(speed.quantization) for layer in manifest.layers) / manifest.num_layers
    flops = _weight_flops(manifest, manifest.all_layers) / manifest.num_layers
    return Hardware(speed.decode_tokens_per_second * weights, speed.prefill_tokens_per_second * flops)


def make_stage(
    hardware: Hardware,
    manifest: ModelManifest,
    layers: LayerRange,
    quantization: Quantization,
    precision: KvPrecision = KvPrecision.BFLOAT16,
) -> StageCosts:
    """The layers without the entry part. Weights of experts count as if each token passed all of them."""
    weights = sum(manifest.layers[layer].at(quantization) for layer in layers.layers)
    cached_bytes = len(layers) * manifest.kv_bytes(1, quantization, precision)
    chunk_cached = len(layers) * FLOPS_A_CACHED_VALUE * manifest.hidden_size / hardware.flops_per_second
    if measured := hardware.measured:
        decode, chunk = measured.decode.times(len(layers)), measured.chunk.times(len(layers))
        return StageCosts(decode, chunk, len(layers) * measured.cached, chunk_cached, weights, cached_bytes)
    flops = _weight_flops(manifest, layers)
    step = Curve.roofline(
        len(layers) * hardware.layer_seconds, weights / hardware.bytes_per_second, flops / hardware.flops_per_second
    )
    return StageCosts(step, step, cached_bytes / hardware.bytes_per_second, chunk_cached, weights, cached_bytes)


def make_head(hardware: Hardware, manifest: ModelManifest, quantization: Quantization) -> HeadCosts:
    """Of an entry node."""
    values = manifest.hidden_size * manifest.vocab_size
    size = min(manifest.entry.at(quantization), BFLOAT16_BYTES * values)
    if hardware.measured:
        return HeadCosts(hardware.measured.head, size)
    flops = FLOPS_A_WEIGHT * values / hardware.flops_per_second
    return HeadCosts(Curve.roofline(0.0, size / hardware.bytes_per_second, flops), size)


def _weight_flops(manifest: ModelManifest, layers: LayerRange) -> float:
    """For one token."""
    return FLOPS_A_WEIGHT * sum(manifest.layers[layer].bfloat16 for layer in layers.layers) / BFLOAT16_BYTES
