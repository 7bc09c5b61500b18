"""Ordinary machines by name.

Published figures are peaks. Steps are taken to reach so much of them: reading weights `REACHED_BANDWIDTH`, multiplying
a chunk of 128 tokens `REACHED_COMPUTE`. What a preset lends is below what is printed on the box, because the driver, a
screen and torch need some: 24 GB are lent of 24 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.estimate.hardware import Hardware

REACHED_BANDWIDTH = 0.75
REACHED_COMPUTE = 0.4
# Launching the kernels of a layer from Python one by one, on a GPU and on a CPU.
GPU_LAYER_SECONDS = 0.0004
CPU_LAYER_SECONDS = 0.0002
GB = 10**9


@dataclass(frozen=True, slots=True)
class Preset:
    """`memory_bytes` is what such a machine lends. `own_memory`: several in one machine do not share it."""

    memory_bytes: int
    hardware: Hardware
    own_memory: bool = False


def _published(bandwidth_gb: float, tflops: float, layer_seconds: float) -> Hardware:
    return Hardware(REACHED_BANDWIDTH * bandwidth_gb * 1e9, REACHED_COMPUTE * tflops * 1e12, layer_seconds)


PRESETS = {
    # Measured, not published: one thread of a Xeon with AMX, the linear layers of SmolLM2-135M in bfloat16: 212 MB in
    # 16 ms a step, 684 tokens/s of a chunk. The time for each layer is a guess.
    "cpu-core": Preset(4 * GB, Hardware(13e9, 145e9, 0.00005)),
    # Two channels of DDR5-5600: 2 x 8 bytes x 5.6 GHz. Eight cores with two 256-bit FMA units at 4.5 GHz: 8 x 32 x 4.5
    # in float32 (intel.com, amd.com: specifications of desktop processors of 2022 and later).
    "desktop": Preset(24 * GB, _published(89.6, 1.15, CPU_LAYER_SECONDS)),
    # 936 GB/s, 71 dense FP16 tensor TFLOPS with FP32 accumulate: "NVIDIA Ampere GA102 GPU Architecture", appendix A.
    "rtx3090": Preset(24 * GB, _published(936, 71, GPU_LAYER_SECONDS), own_memory=True),
    # 1008 GB/s, 165.2 dense FP16 tensor TFLOPS with FP32 accumulate: "NVIDIA Ada GPU Architecture", appendix A.
    "rtx4090": Preset(24 * GB, _published(1008, 165.2, GPU_LAYER_SECONDS), own_memory=True),
    # 2039 GB/s, 312 dense bfloat16 tensor TFLOPS: "NVIDIA A100 80GB" datasheet.
    "a100": Preset(80 * GB, _published(2039, 312, GPU_LAYER_SECONDS), own_memory=True),
}
DEFAULT_PRESET = "desktop"
