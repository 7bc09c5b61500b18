"""What `meshnet estimate` would be told of this machine: from steps that were timed, and from meshes of stubs."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.estimate_error.meshes import SESSIONS, Bare
from benchmarks.estimate_error.steps import Worker, ask_all
from meshnet.chunks import CHUNK_TOKENS, LARGE_CHUNK_TOKENS
from meshnet.estimate.curve import Curve
from meshnet.estimate.hardware import FLOPS_A_WEIGHT, Hardware, MeasuredSteps
from meshnet.estimate.mesh import Surroundings
from meshnet.estimate.pipeline import FrameCosts, Machine, Way
from meshnet.model import ModelManifest, Quantization
from meshnet.topology import Topology

ROWS = (1, 4, 8, 16)
CHUNKS = (32, CHUNK_TOKENS, LARGE_CHUNK_TOKENS)
# At once with another: what is bound by memory, and what by multiplying.
TOGETHER = ("decode 1", f"chunk {CHUNK_TOKENS}")
COMMANDS = (
    *(f"decode {rows}" for rows in ROWS),
    *(f"chunk {tokens}" for tokens in CHUNKS),
    *(f"head {rows}" for rows in ROWS),
)
STEP_SECONDS = 1.0
MACHINE = "this"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds by command: of one worker alone, and of as many workers at once as there are cores."""

    alone: Mapping[str, float]
    together: Mapping[str, float]


def calibrate(workers: Sequence[Worker]) -> Calibration:
    """The workers are as many as the machine has cores."""
    alone, together = {}, {}
    for command in COMMANDS:
        alone[command] = ask_all(workers[:1], f"{command} {STEP_SECONDS}")
        if command in TOGETHER:
            together[command] = ask_all(workers, f"{command} {STEP_SECONDS}")
    return Calibration(alone, together)


def median_calibration(found: Sequence[Calibration]) -> Calibration:
    return Calibration(
        {command: statistics.median(one.alone[command] for one in found) for command in COMMANDS},
        {command: statistics.median(one.together[command] for one in found) for command in TOGETHER},
    )


def median_bare(found: Sequence[Bare]) -> Bare:
    return Bare(*(statistics.median(getattr(one, name) for one in found) for name in ("single", "many", "cpu")))


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def hardware_of(found: Calibration, manifest: ModelManifest) -> Hardware:
    def curve(kind: str, counts: Sequence[int], share: float) -> Curve:
        return Curve.through((count, found.alone[f"{kind} {count}"] * share) for count in counts)

    a_layer = 1 / manifest.num_layers
    weights = _layer_bytes(manifest)
    return Hardware(
        weights / found.alone["decode 1"],
        FLOPS_A_WEIGHT * weights / 2 * CHUNK_TOKENS / found.alone[f"chunk {CHUNK_TOKENS}"],
        measured=MeasuredSteps(
            decode=curve("decode", ROWS, a_layer),
            chunk=curve("chunk", CHUNKS, a_layer),
            head=curve("head", ROWS, 1.0),
            # Sessions had as many tokens cached as they have in the meshes.
            cached=0.0,
        ),
    )


def machine_of(found: Calibration, manifest: ModelManifest) -> Machine:
    """Where nothing was in the way of another, all cores and as often the memory."""
    cores = num_cores()
    chunk = f"chunk {CHUNK_TOKENS}"
    slowed = max(found.together[chunk] / found.alone[chunk], 1.0)
    return Machine(cores / slowed, cores * _layer_bytes(manifest) / found.together["decode 1"])


def frames_of(found: Mapping[int, Bare]) -> FrameCosts:
    """From stub meshes by number of nodes, of which one has a single node."""
    one = found[1]
    row = max((SESSIONS * one.many - one.single) / (SESSIONS - 1), 0.0)
    longer = [(count, bare.single - one.single) for count, bare in found.items() if count > 1]
    hops = sum(count for count, _ in longer)
    return FrameCosts(
        step=max(one.single - row, 0.0),
        row=row,
        hop=max(sum(more for _, more in longer) / hops, 0.0) if hops else 0.0,
        aside=max(one.cpu - one.many, 0.0),
    )


def surroundings_of(
    topology: Topology, manifest: ModelManifest, found: Calibration, bare: Mapping[int, Bare]
) -> Surroundings:
    """All nodes on this machine, each of one thread."""
    hardware = hardware_of(found, manifest)
    return Surroundings(
        hardware=dict.fromkeys(topology.nodes, hardware),
        way=lambda sender, receiver: Way(),
        machine_of=dict.fromkeys(topology.nodes, MACHINE),
        machines={MACHINE: machine_of(found, manifest)},
        frames=frames_of(bare),
    )


def spec_of(found: Calibration, manifest: ModelManifest) -> str:
    """As `--node` takes it; there steps are made of bandwidth and computing again."""
    hardware, machine = hardware_of(found, manifest), machine_of(found, manifest)
    assert machine.cores
    assert machine.bytes_per_second
    return (
        f"memory=4GB,bandwidth={hardware.bytes_per_second / 1e9:.1f}GB/s,"
        f"compute={hardware.flops_per_second / 1e9:.0f}GFLOPS,machine={MACHINE},"
        f"cores={machine.cores:.2f},shared={machine.bytes_per_second / 1e9:.1f}GB/s"
    )


def _layer_bytes(manifest: ModelManifest) -> int:
    return sum(layer.at(Quantization.BFLOAT16) for layer in manifest.layers)
