"""One row of `benchmarks.memory`, as JSON: `python -m benchmarks.memory_row MODEL WARM_UP PRECISION KV [START END]`."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shard_step import run
from meshnet.model import BLOCK_TOKENS, LayerRange, ModelManifest, Quantization, blocks_for
from meshnet.model_files import ModelFiles
from services.node.core.batching import TOKEN_BUDGET
from services.node.core.work import ForwardWork, PromptWork, SampleWork, Sampling, Segment, SessionKey, ShardSpec
from services.node.core.workspace import predict_workspace_bytes
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes(kind: str = "VmRSS") -> int:
    """`VmHWM`: the most since `forget_peak`."""
    match = re.search(rf"^{kind}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert match
    return 1024 * int(match[1])


def forget_peak() -> None:
    CLEAR_REFS.write_text("5")


def main(arguments: Sequence[str]) -> None:
    path, warm_up, precision, kv_tokens, *bounds = arguments
    quantization = Quantization(precision)
    files = {"model": ModelFiles("model", Path(path)), "tiny": ModelFiles("tiny", Path(warm_up))}
    executor = TorchExecutor(files)
    tiny, manifest = (read_manifest(files[name]) for name in ("tiny", "model"))
    for layers in (tiny.all_layers, LayerRange(1, 2)):
        shard = load(executor, tiny, layers, quantization, 1024)
        executor.attach(shard)
        run_largest_step(executor, tiny, layers, 512)
        del shard
        executor.detach("tiny", layers)
    # What is compiled for heads and layers of its sizes stays, whatever is loaded.
    load(executor, manifest, LayerRange(1, 2), quantization, 1024)
    gc.collect()

    layers = LayerRange(*map(int, bounds)) if bounds else manifest.all_layers
    kv_bytes = manifest.kv_bytes(blocks_for(int(kv_tokens)) * BLOCK_TOKENS, quantization)
    base = resident_bytes()
    forget_peak()
    shard = load(executor, manifest, layers, quantization, int(kv_tokens))
    loading = resident_bytes("VmHWM") - base
    executor.attach(shard)
    loaded = resident_bytes() - base
    forget_peak()
    if not bounds:
        run_largest_step(executor, manifest, layers, int(kv_tokens))
    row = {
        "weights": manifest.weight_bytes(layers, quantization),
        "weights_held": shard.weight_bytes,
        "kv": len(layers) * kv_bytes,
        "kv_held": executor.kv_bytes,
        "workspace": predict_workspace_bytes(
            manifest, quantization, int(kv_tokens), entry=layers.start == 0, layers=layers
        ),
        "total_held": resident_bytes("VmHWM") - base,
        "loading": loading,
        "loaded": loaded,
        "base": base,
    }
    print(json.dumps(row))


def load(executor: TorchExecutor, manifest: ModelManifest, layers: LayerRange, q: Quantization, kv_tokens: int) -> Any:
    return executor.load(ShardSpec(manifest, layers, q, kv_tokens), lambda done, total: None)


def run_largest_step(executor: TorchExecutor, manifest: ModelManifest, layers: LayerRange, kv_tokens: int) -> None:
    """As many chunks as are batched, one at the end of a session as long as there is room; then as many tokens drawn
    as there could be sessions."""
    chunks = TOKEN_BUDGET // BLOCK_TOKENS
    room = min(kv_tokens - (chunks - 1) * BLOCK_TOKENS, manifest.context_length) - BLOCK_TOKENS
    for position in range(0, room, BLOCK_TOKENS):
        run(executor, [chunk(manifest, layers, 0, position, min(BLOCK_TOKENS, room - position))])
    step = [chunk(manifest, layers, session, 0 if session else max(room, 0), BLOCK_TOKENS) for session in range(chunks)]
    rows = run(executor, step)
    if layers.start == 0:
        samples = [SampleWork(manifest.model_id, rows[0], Sampling(), 0.5)] * blocks_for(kv_tokens)
        run(executor, samples)


def chunk(
    manifest: ModelManifest, layers: LayerRange, session: int, position: int, tokens: int
) -> PromptWork | ForwardWork:
    key = SessionKey(f"s{session}", manifest.model_id, layers)
    segments = (Segment(key, position, tokens, 1),)
    if layers.start == 0:
        return PromptWork(manifest.model_id, layers, segments, tuple(range(tokens)))
    return ForwardWork(manifest.model_id, layers, segments, bytes(2 * tokens * manifest.hidden_size))


if __name__ == "__main__":
    main(sys.argv[1:])
