"""What nodes take of memory against what was predicted.

    python -m benchmarks.memory [--models NAME,...] [--quantizations NAME,...]

Each row is measured in a process of its own, over what an empty node takes there: one that has imported all it needs
and has loaded, run and dropped a tiny model of the same kind at the same precision. Weights: the bytes of the tensors
that are held. Total: how far resident memory goes up until the largest step of the whole model has run; workspace: what
is neither weights nor KV cache of it. Linux only. Rows that are off by more than 5% of the weights or 10% of the total
are marked, and then the exit status is 1.
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

from rich.console import Console
from rich.table import Table

from benchmarks.memory_models import MODELS, save_made_up
from meshnet.model import LayerRange, Quantization
from meshnet.sizes import format_size

KV_TOKENS = 2048
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
    def workspace_held(self) -> int:
        return self.total_held - self.weights_held - self.kv_held

    @property
    def loading_overhead(self) -> int:
        """What loading takes at most beside the weights and KV caches that it is for."""
        return self.loading - self.weights_held - self.kv_held

    @property
    def weights_error(self) -> float:
        return self.weights / self.weights_held - 1

    @property
    def total_error(self) -> float:
        return self.total / self.total_held - 1

    @property
    def is_true(self) -> bool:
        return abs(self.weights_error) <= WEIGHTS_TOLERANCE and abs(self.total_error) <= TOTAL_TOLERANCE


def measure(path: Path, warm_up: Path, quantization: Quantization, layers: LayerRange | None, kv_tokens: int) -> Row:
    """One row, in a process of its own. `layers` None: all. Raises CalledProcessError."""
    bounds = [str(layers.start), str(layers.end)] if layers else []
    arguments = [str(path), str(warm_up), quantization.value, str(kv_tokens), *bounds]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory_row", *arguments]
    outcome = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Row(**json.loads(outcome.stdout.splitlines()[-1]))


def predicted_against_measured(
    folder: Path, names: list[str], quantizations: list[Quantization]
) -> Iterator[tuple[str, Quantization, Row]]:
    """One row after the other."""
    for name in names:
        path, warm_up = save_made_up(folder, name)
        for quantization in quantizations:
            yield name, quantization, measure(path, warm_up, quantization, None, KV_TOKENS)


def show(held: int, predicted: int) -> str:
    return f"{format_size(predicted)} / {format_size(held)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--quantizations", default=",".join(Quantization))
    parser.add_argument("--json", type=Path, help="file to write all rows to")
    options = parser.parse_args()
    quantizations = [Quantization(name) for name in options.quantizations.split(",")]
    table = Table("model", "precision", "weights", "", "KV cache", "workspace", "total", "", "")
    table.title = "predicted / measured, and how much the prediction is off"
    written, false = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name, quantization, row in predicted_against_measured(
            Path(folder), options.models.split(","), quantizations
        ):
            table.add_row(
                *(name, quantization.value, show(row.weights_held, row.weights), f"{row.weights_error:+.1%}"),
                *(show(row.kv_held, row.kv), show(row.workspace_held, row.workspace)),
                *(show(row.total_held, row.total), f"{row.total_error:+.1%}", "" if row.is_true else "VIOLATION"),
            )
            false += not row.is_true
            written.append({"model": name, "quantization": quantization.value, **asdict(row)})
            print(json.dumps(written[-1]), file=sys.stderr, flush=True)
    Console(width=160).print(table)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1))
    sys.exit(1 if false else 0)


if __name__ == "__main__":
    main()
