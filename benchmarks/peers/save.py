"""Saves a GGUF model as a Hugging Face directory in bfloat16, with its tokenizer: `python -m benchmarks.peers.save`."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoTokenizer

from tests.parity import Reference


def main() -> None:
    gguf, folder = Path(sys.argv[1]), Path(sys.argv[2])
    Reference(gguf).model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
