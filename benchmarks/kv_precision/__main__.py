"""SmolLM2-135M with KV caches at bfloat16 and at int8, on one CPU thread.

    python -m benchmarks.kv_precision [output] [rounding] [time]

`output`: teacher-forced over a fixed text, and greedy answers. `rounding`: the same with other ways to round, to choose
among them. `time`: decode steps, the two precisions in turn. Without a word: all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.kv_precision.output import output_tables
from benchmarks.kv_precision.rounding import rounding_tables
from benchmarks.kv_precision.timing import timing_table
from tests.smollm2 import smollm2_path

TEXT = Path(__file__).parent.parent / "data" / "kv_text.txt"
MAX_TOKENS = 1000


def tables(part: str, tokens: Sequence[int]) -> Iterable[Table]:
    match part:
        case "output":
            return output_tables(tokens)
        case "rounding":
            return rounding_tables(tokens)
        case _:
            return [timing_table()]


def main(parts: Sequence[str]) -> None:
    path = smollm2_path()
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = tokenizer.encode(TEXT.read_text())[:MAX_TOKENS]
    console = Console(width=120, highlight=False)
    for part in parts or ("output", "rounding", "time"):
        for table in tables(part, tokens):
            console.print(table)
            console.print()


if __name__ == "__main__":
    main(sys.argv[1:])
