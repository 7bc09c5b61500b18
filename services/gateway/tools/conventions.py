"""How models write calls of tools.

::

    HERMES        <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...
    MISTRAL       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
    MISTRAL_ARGS  [TOOL_CALLS]f[ARGS]{...} ...
    LLAMA         {"name": "f", "parameters": {...}}
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
PYTHON_TAG = "<|python_tag|>"
# In some vocabularies they are special tokens, which are no text otherwise.
MARKERS = (OPEN, CLOSE, CALLS, ARGS, CALL_ID, PYTHON_TAG)


class Writing(StrEnum):
    HERMES = "hermes"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral_args"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True)
class Convention:
    """`is_native`: the chat template takes tools and calls, with arguments as text if `has_text_arguments`. If not,
    they are written into the messages before it: into one of the system, or of the user where it `takes_no_system`."""

    writing: Writing
    is_native: bool
    has_text_arguments: bool = False
    takes_no_system: bool = False
