"""What it costs a node to learn the revision of a model.

    python -m benchmarks.revision_cost [MODEL ...]

MODEL is a GGUF file or a directory; without one, SmolLM2-135M and a made-up model of 1,000 tensors (a sparse file).
"Cold" is after the system was asked to forget what it keeps of the files; headers are read anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshnet.model_files import ModelFiles
from meshnet.sizes import format_size
from services.node.files.gguf_header import gguf_tensors, open_gguf
from services.node.files.manifest import read_manifest
from services.node.files.safetensors_header import SINGLE_FILE, TensorHeader, read_directory
from services.node.files.weight_samples import blocks, sample_digests
from tests.smollm2 import smollm2_path

REPEATS = 7
NUM_LAYERS, HIDDEN, INNER = 111, 1536, 4096
LAYER_SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def save_sparse_model(folder: Path) -> Path:
    """A directory with a whole header and holes for weights: 5.6 GB that take no room."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32000, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER_SHAPES.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + TensorHeader("BF16", shape, "", 0, 0).numel * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / SINGLE_FILE).write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / SINGLE_FILE, 8 + len(text) + end)
    return folder


def measure(files: ModelFiles) -> Iterator[str]:
    """A row of the table."""
    folder = files.path.parent if files.is_gguf else files.path
    tensors = gguf_tensors(open_gguf(files)) if files.is_gguf else read_directory(folder)
    paths = {folder / tensor.file for tensor in tensors.values()}
    sampled = [length for tensor in tensors.values() for _, length in blocks(tensor.num_bytes)]
    yield files.model_id
    yield f"{len(tensors)}"
    yield format_size(sum(path.stat().st_size for path in paths))
    yield f"{len(sampled)}"
    yield format_size(sum(sampled))
    for work in (lambda: sample_digests(folder, tensors), lambda: read_manifest(files)):
        yield f"{milliseconds(work, paths):.1f}"
        yield f"{milliseconds(work, ()):.1f}"


def milliseconds(work: Callable[[], object], cold: Iterable[Path]) -> float:
    """The median time, each time without what the system kept of `cold`."""
    times = []
    for _ in range(REPEATS):
        for path in cold:
            forget(path)
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


def forget(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    options = parser.parse_args()
    table = Table("model", "tensors", "size", "reads", "read", "samples, cold", "warm", "manifest, cold", "warm, ms")
    with tempfile.TemporaryDirectory() as folder:
        for path in options.models or [smollm2_path(), save_sparse_model(Path(folder) / "made-up")]:
            table.add_row(*measure(ModelFiles(path.name, path)))
    Console().print(table)


if __name__ == "__main__":
    main()
