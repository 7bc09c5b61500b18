"""What nodes take of memory against what was predicted, and what they take at most while they load.

    python -m benchmarks.memory [--models NAME,...] [--quantizations NAME,...]

Each row is measured in a process of its own, over what an empty node takes there: one that has imported all it needs
and has loaded, run and dropped a tiny model of the same kind at the same precision. Weights: the bytes of the tensors
that are held. Total: how far resident memory goes up until the largest step of the whole model has run. Linux only.


"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.memory_models import MODELS, save_made_up, save_sparse
from meshnet.model import LayerRange, Quantization
from meshnet.sizes import format_size

KV_TOKENS = 2048
# A model that is so much larger than what the node may use.
TIMES_LARGER = 20
WEIGHTS_TOLERANCE, TOTAL_TOLERANCE = 0.05, 0.10


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of one shard, predicted and measured.

    `loading`: the most while it was loaded, `loaded`: when that was done, `base`: the empty node.
    """

    weights: int
    weights_held: int
    kv: int
    kv_held: int
    workspace: int
    total_held: int
    loading: int
    loaded: int
    base: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace

    @property
    def weights_error(self) -> float:
        return self.weights / self.weights_held - 1

    @property
    def total_error(self) -> float:
        return self.total / self.total_held - 1


def measure(path: Path, warm_up: Path, quantization: Quantization, layers: LayerRange | None, kv_tokens: int) -> Row:
    """One row, in a process of its own. `layers` None: all. Raises CalledProcessError."""
    bounds = [str(layers.start), str(layers.end)] if layers else []
    arguments = [str(path), str(warm_up), quantization.value, str(kv_tokens), *bounds]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory_row", *arguments]
    outcome = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Row(**json.loads(outcome.stdout.splitlines()[-1]))


def predicted_against_measured(folder: Path, names: list[str], quantizations: list[Quantization]) -> Iterator[Any]:
    """(model, quantization, Row) one by one."""
    for name in names:
        path, warm_up = save_made_up(folder, name)
        for quantization in quantizations:
            yield name, quantization, measure(path, warm_up, quantization, None, KV_TOKENS)


def loading_peaks(folder: Path, layer_bytes: int) -> Iterator[tuple[str, Row]]:
    """While parts of a made-up model of 60 layers are loaded, in bfloat16 and with few tokens of KV cache."""
    num_layers = 3 * TIMES_LARGER
    path, warm_up = save_sparse(folder, num_layers, layer_bytes)
    for share in (TIMES_LARGER, 3):
        layers = LayerRange(1, 1 + num_layers // share)
        for quantization in (Quantization.BFLOAT16, Quantization.NF4):
            yield f"1/{share} at {quantization}", measure(path, warm_up, quantization, layers, 128)


def show(value: int, predicted: int | None = None) -> str:
    return format_size(value) if predicted is None else f"{format_size(value)} ({predicted / value - 1:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--quantizations", default=",".join(Quantization))
    parser.add_argument("--layer-mb", type=int, default=50, help="of the made-up model's 60 layers")
    parser.add_argument("--json", type=Path, help="file to write all rows to")
    options = parser.parse_args()
    console, written = Console(width=140), []
    quantizations = [Quantization(name) for name in options.quantizations.split(",")]
    made = Table(
        "model", "precision", "weights: predicted", "held", "KV: predicted", "held", "workspace", "total", "held"
    )
    peaks = Table("loaded", "weights", "most while loading", "above the weights", "empty node")
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in options.models.split(",") if name]
        for name, quantization, row in predicted_against_measured(Path(folder), names, quantizations):
            made.add_row(
                *(name, quantization.value, show(row.weights), show(row.weights_held, row.weights)),
                *(show(row.kv), show(row.kv_held, row.kv), show(row.workspace)),
                *(show(row.total), show(row.total_held, row.total)),
            )
            written.append({"model": name, "quantization": quantization.value, **asdict(row)})
            print(json.dumps(written[-1]), file=sys.stderr, flush=True)
        for name, row in loading_peaks(Path(folder), options.layer_mb * 10**6):
            above = row.loading - row.weights_held - row.kv_held
            peaks.add_row(name, *map(show, (row.weights_held, row.loading, above, row.base)))
            written.append({"model": "sparse", "loaded": name, **asdict(row)})
            print(json.dumps(written[-1]), file=sys.stderr, flush=True)
    console.print(made)
    console.print(peaks)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
