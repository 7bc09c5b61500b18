"""What loading takes at most, of models that are much larger than what the node may use.

    python -m benchmarks.loading_peak [--layer-mb MB]

A made-up model of 60 layers, whose files are all holes and take no room on disk. Each row is measured in a process of
its own, as in `benchmarks.memory`. What is above the weights and KV caches must not grow with the model. Linux only.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.memory import Row, measure
from benchmarks.memory_models import save_sparse
from meshnet.model import LayerRange, Quantization
from meshnet.sizes import format_size

NUM_LAYERS = 60
KV_TOKENS = 128
SHARES = (
    (3, Quantization.BFLOAT16),
    (3, Quantization.INT8),
    (3, Quantization.NF4),
    (20, Quantization.BFLOAT16),
    (20, Quantization.NF4),
)


def loading_peaks(folder: Path, layer_bytes: int) -> Iterator[tuple[str, Row]]:
    """While parts of the model are loaded, with few tokens of KV cache."""
    path, warm_up = save_sparse(folder, NUM_LAYERS, layer_bytes)
    for share, quantization in SHARES:
        layers = LayerRange(1, 1 + NUM_LAYERS // share)
        yield f"1/{share} at {quantization}", measure(path, warm_up, quantization, layers, KV_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer-mb", type=int, default=50, help="of each of the 60 layers, in bfloat16")
    options = parser.parse_args()
    table = Table("loaded", "weights", "KV cache", "most while loading", "above weights and KV cache", "empty node")
    table.title = f"of a model of {format_size(NUM_LAYERS * options.layer_mb * 10**6)} in bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        for name, row in loading_peaks(Path(folder), options.layer_mb * 10**6):
            sizes = (row.weights_held, row.kv_held, row.loading, row.loading_overhead, row.base)
            table.add_row(name, *map(format_size, sizes))
            print(json.dumps({"loaded": name, **asdict(row)}), file=sys.stderr, flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
