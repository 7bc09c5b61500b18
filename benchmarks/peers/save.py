"""Saves a GGUF model as a Hugging Face directory in bfloat16, with its tokenizer: `python -m benchmarks.peers.save`."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoTokenizer

from tests.parity import Reference


def save_tokenizer(gguf: Path, folder: Path) -> None:
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    gguf, folder = Path(sys.argv[1]), Path(sys.argv[2])
    Reference(gguf).model.save_pretrained(folder)
    save_tokenizer(gguf, folder)


if __name__ == "__main__":
    main()
