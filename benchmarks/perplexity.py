"""How likely a text is to the mesh, and to transformers at the same precision.

    python -m benchmarks.perplexity

SmolLM2-135M over the first chapter of Alice's Adventures in Wonderland, teacher-forced: unsharded in transformers (at
int8 and nf4 with bitsandbytes), unsharded in float32 with the weights that such a precision holds, and as one shard
and as three, in chunks of 128 tokens, with a bfloat16 boundary behind each shard. Differences are of the
log-probabilities of the text's tokens, to transformers at the same precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from meshnet.chunks import CHUNK_TOKENS
from meshnet.model import Quantization
from meshnet.model_files import ModelFiles
from services.node.engine.device import machine_name
from tests.oracle import log_probabilities, unsharded_and_exact
from tests.parity import Reference
from tests.services.node.engine.models import MODEL, mesh, splits_of
from tests.smollm2 import smollm2_path

TEXT = Path(__file__).parent / "data" / "alice.txt"
NUM_LAYERS = 30
# Rows of logits in float32 at once: each is 200 kB.
ROWS = 256


def by_rows(tokens: list[int], logits: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """`[tokens - 1]` log-probabilities; `logits` gives those of rows `[start, end)`."""
    targets = tokens[1:]
    ends = [(start, min(start + ROWS, len(targets))) for start in range(0, len(targets), ROWS)]
    return torch.cat([log_probabilities(logits(start, end), targets[start:end]).cpu() for start, end in ends])


def of_reference(reference: Reference, tokens: list[int]) -> torch.Tensor:
    logits = reference.logits(tokens)
    return by_rows(tokens, lambda start, end: logits[start:end])


def of_mesh(
    files: ModelFiles, tokens: list[int], ends: tuple[int, ...], quantization: Quantization, device: str
) -> torch.Tensor:
    with mesh(files, splits_of(NUM_LAYERS, *ends), quantization, device, len(tokens)) as shards:
        chunks = [tokens[start : start + CHUNK_TOKENS] for start in range(0, len(tokens), CHUNK_TOKENS)]
        hidden = b"".join(bytes(shards.rows({"text": chunk})["text"]) for chunk in chunks)
        row = shards.manifest.hidden_size * 2
        return by_rows(tokens, lambda start, end: shards.logits(memoryview(hidden[start * row : end * row])))


def measured(
    files: ModelFiles, float32: Reference, tokens: list[int], quantization: Quantization, device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Log-probabilities by where they were computed, transformers first."""
    served, exact = unsharded_and_exact(float32, quantization, device)
    is_quantized = quantization in (Quantization.INT8, Quantization.NF4)
    yield f"transformers{' + bitsandbytes' if is_quantized else ''}", of_reference(served, tokens)
    if quantization is not Quantization.FLOAT32:
        yield "its weights, in float32", of_reference(exact, tokens)
    del served, exact
    yield "mesh, 1 shard", of_mesh(files, tokens, (), quantization, device)
    yield "mesh, 3 shards", of_mesh(files, tokens, (10, 20), quantization, device)


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads that transformers uses; shards use one.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="How much of the text, at most.")] = 4096,
) -> None:
    path = smollm2_path()
    ids = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).encode(TEXT.read_text(encoding="utf-8"))[
        :tokens
    ]
    files, float32 = ModelFiles(MODEL, path), Reference(path, torch.float32)
    table = Table(title=f"SmolLM2-135M, {len(ids)} tokens, {machine_name(torch.device(device))}")
    for column in ("precision", "computed by"):
        table.add_column(column)
    for column in ("perplexity", "mean difference", "largest"):
        table.add_column(column, justify="right")
    for quantization in Quantization:
        torch.set_num_threads(threads)
        wanted: torch.Tensor | None = None
        for name, seen in measured(files, float32, ids, quantization, device):
            wanted = seen if wanted is None else wanted
            difference = (seen - wanted).abs()
            figures = f"{math.exp(-seen.mean()):.4f}", f"{difference.mean():.5f}", f"{difference.max():.4f}"
            table.add_row(str(quantization), name, *(figures if seen is not wanted else (figures[0], "", "")))
        table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
