"""Compiles one grammar and ends. Run as a program of its own, so that what it dies of is nobody else's death.

Standard input: JSON `{"grammar", "limits", "cpu_seconds", "memory_bytes", "stack_bytes"}`, the first as LLMatcher takes
it. Standard output: JSON, null or what is wrong with it. Imports nothing of meshnet.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

NUM_BYTES = 256


class Bytes:
    """A vocabulary of all bytes and an end, for LLTokenizer."""

    is_tokenizer_wrapper = True
    eos_token_id = NUM_BYTES
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(NUM_BYTES)), b"<end>")
    special_token_ids = (NUM_BYTES,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def error_of(grammar: str, limits: dict[str, Any]) -> str | None:
    tokenizer: Any = LLTokenizer(Bytes(), slices=[])  # type: ignore[arg-type]
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() or None


def main() -> None:
    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (asked["cpu_seconds"],) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"],) * 2)
    found: list[str | None] = []
    # Less stack than threads have elsewhere: what fits here fits there.
    threading.stack_size(asked["stack_bytes"])
    thread = threading.Thread(target=lambda: found.append(error_of(asked["grammar"], asked["limits"])))
    thread.start()
    thread.join()
    json.dump(found[0], sys.stdout)


if __name__ == "__main__":
    main()
