"""Nodes as people lend them: a few kinds of real devices, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.mesh_churn.catalogue import Catalogue, Sizes
from meshnet.model import Quantization
from meshnet.topology import Node, Shard, Speed

GIB = 2**30
Q = Quantization
# Quantized weights are read faster than they are unpacked.
UNPACKING = {Q.BFLOAT16: 1.0, Q.INT8: 0.8, Q.NF4: 0.6, Q.FLOAT32: 1.0}
# What a layer costs however small it is: launches, synchronisation.
LAYER_OVERHEAD_SECONDS = 5e-5


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of machine; bandwidths in bytes a second: of its memory, and of loading (disk, conversion)."""

    name: str
    share: float
    memory_gib: float
    memory_bandwidth: float
    load_bandwidth: float
    quantizations: tuple[Quantization, ...]


DEVICES = (
    Device("laptop cpu", 0.12, 6, 40e9, 0.3e9, (Q.INT8, Q.NF4)),
    Device("desktop cpu", 0.10, 16, 60e9, 0.5e9, (Q.INT8, Q.BFLOAT16, Q.NF4)),
    Device("gtx 1660", 0.10, 6, 192e9, 0.4e9, (Q.NF4,)),
    Device("rtx 3060", 0.20, 12, 360e9, 0.8e9, (Q.NF4, Q.INT8)),
    Device("t4", 0.10, 16, 300e9, 0.4e9, (Q.INT8, Q.NF4)),
    Device("m2 pro", 0.12, 16, 200e9, 1.5e9, (Q.BFLOAT16, Q.INT8, Q.NF4)),
    Device("rtx 4090", 0.16, 24, 1000e9, 1.5e9, (Q.INT8, Q.BFLOAT16, Q.NF4)),
    Device("a6000", 0.07, 48, 768e9, 1.0e9, (Q.BFLOAT16, Q.INT8, Q.NF4)),
    Device("a100", 0.03, 80, 2000e9, 2.0e9, (Q.BFLOAT16, Q.INT8)),
)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A machine, whoever runs what on it. `true_bytes` is what it really has of the `vram_bytes` that it declares."""

    node_id: str
    site: str
    device: Device
    vram_bytes: int
    true_bytes: int
    load_bandwidth: float
    files: tuple[str, ...]
    tracker_node: bool = False

    @property
    def quantization(self) -> Quantization:
        return self.device.quantizations[0]

    def layer_seconds(self, sizes: Sizes, quantization: Quantization) -> float:
        """Time of one token through a mean layer: the weights that it uses are read once."""
        weights = sizes.weights[quantization][1:]
        read = sizes.active_share * sum(weights) / len(weights)
        return read / (self.device.memory_bandwidth * UNPACKING[quantization]) + LAYER_OVERHEAD_SECONDS


def mean_vram_bytes() -> float:
    return sum(d.share * d.memory_gib for d in DEVICES) / sum(d.share for d in DEVICES) * 0.85 * GIB


def draw_node(
    rng: random.Random, node_id: str, site: str, model_ids: Sequence[str], num_files: int, overstated: float
) -> NodeSpec:
    """`num_files`: models whose files the node has, 0 for all; `overstated`: probability that it lends more memory
    than it has."""
    (device,) = rng.choices(DEVICES, [d.share for d in DEVICES])
    vram_bytes = int(device.memory_gib * rng.uniform(0.7, 1.0) * GIB)
    files = tuple(model_ids) if not num_files else tuple(rng.sample(model_ids, min(num_files, len(model_ids))))
    return NodeSpec(
        node_id=node_id,
        site=site,
        device=device,
        vram_bytes=vram_bytes,
        true_bytes=int(vram_bytes * (rng.uniform(0.6, 0.95) if rng.random() < overstated else 1.0)),
        load_bandwidth=device.load_bandwidth * rng.uniform(0.5, 1.5),
        files=files,
    )


def described(spec: NodeSpec, catalogue: Catalogue, shards: tuple[Shard, ...] = ()) -> Node:
    """The node as it registers."""
    return Node(
        node_id=spec.node_id,
        forward_address="192.0.2.1:7000",
        grpc_address="192.0.2.1:7001",
        vram_bytes=spec.vram_bytes,
        quantization=spec.quantization,
        fallbacks=spec.device.quantizations[1:],
        shards=shards,
        available_models=frozenset(spec.files),
        tracker_node=spec.tracker_node,
        device=spec.device.name,
        site=spec.site,
        speeds=tuple(_speed(spec, catalogue[i], q) for i in spec.files for q in spec.device.quantizations),
    )


def _speed(spec: NodeSpec, sizes: Sizes, quantization: Quantization) -> Speed:
    seconds = spec.layer_seconds(sizes, quantization)
    # A chunk reads the weights once for all of its tokens, until arithmetic is the limit: some 20 tokens a read.
    return Speed(sizes.model_id, quantization, 20 / seconds, 1 / seconds)
