"""How long a shard's steps take: SmolLM2-135M whole, on one CPU thread.

Run from the root: `python -m benchmarks.shard_step [bfloat16|int8|nf4|float32]`. Prints ms a decode step (layers,
then norm, head and greedy choice) and tokens/s of a 128-token prefill chunk; the median of repeated steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshnet.chunks import CHUNK_TOKENS
from meshnet.model import LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import PromptWork, SampleWork, Sampling, Segment, SessionKey, ShardSpec, Work
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from tests.smollm2 import smollm2_path

MODEL = "smollm2"
CACHED_TOKENS = (200, 1000)
SESSIONS = (1, 4, 16)
REPEATS = 15


def run(executor: TorchExecutor, works: Sequence[Work]) -> list[Any]:
    """Runs a batch none of whose works may fail."""
    results = executor.run(works)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def prompt(session: int, position: int, num_tokens: int, layers: LayerRange, num_returned: int) -> PromptWork:
    segment = Segment(SessionKey(f"s{session}", MODEL, layers), position, num_tokens, num_returned)
    return PromptWork(MODEL, layers, (segment,), tuple(1000 + index for index in range(num_tokens)))


def median_ms(step: Callable[[], object]) -> float:
    step()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def main(quantization: Quantization) -> None:
    files = ModelFiles(MODEL, smollm2_path())
    manifest = read_manifest(files)
    layers = manifest.all_layers
    executor = TorchExecutor({MODEL: files}, threads=1)
    started = time.perf_counter()
    shard = executor.load(ShardSpec(manifest, layers, quantization, 1 << 16), lambda done, total: None)
    print(f"{quantization}: loaded {shard.weight_bytes / 1e6:.0f} MB in {time.perf_counter() - started:.1f} s")
    executor.attach(shard)

    for cached in (0, *CACHED_TOKENS):
        for start in range(0, cached, CHUNK_TOKENS):
            run(executor, [prompt(0, start, min(CHUNK_TOKENS, cached - start), layers, 0)])
        chunk = prompt(0, cached, CHUNK_TOKENS, layers, 1)
        ms = median_ms(lambda chunk=chunk: run(executor, [chunk]))  # type: ignore[misc]
        print(f"prefill of {CHUNK_TOKENS} tokens behind {cached:4}: {CHUNK_TOKENS / ms * 1e3:5.0f} tokens/s")

    for cached in CACHED_TOKENS:
        for session in range(max(SESSIONS)):
            for start in range(0, cached, CHUNK_TOKENS):
                run(executor, [prompt(session, start, min(CHUNK_TOKENS, cached - start), layers, 0)])
        for sessions in SESSIONS:
            decode = [prompt(session, cached, 1, layers, 1) for session in range(sessions)]
            step_ms = median_ms(lambda decode=decode: run(executor, decode))  # type: ignore[misc]
            sample: list[Work] = [
                SampleWork(MODEL, row, Sampling(), 0.5) for row in run(executor, decode) if isinstance(row, memoryview)
            ]
            head_ms = median_ms(lambda sample=sample: run(executor, sample))  # type: ignore[misc]
            rate = f"{sessions / (step_ms + head_ms) * 1e3:4.0f} tokens/s"
            parts = f"{step_ms:6.1f} ms layers + {head_ms:5.1f} ms head"
            print(f"decode of {sessions:2} sessions behind {cached:4}: {parts}, {rate}")


if __name__ == "__main__":
    main(Quantization(sys.argv[1]) if len(sys.argv) > 1 else Quantization.BFLOAT16)
