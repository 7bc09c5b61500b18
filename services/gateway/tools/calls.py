"""Calls of tools, and what a request asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is a JSON object as text. `index`: which of its choice's calls it is."""

    name: str
    arguments: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolsAsked:
    """`tools` as chat templates take them. `must_call`: the answer is nothing but calls, of those of the names
    `callable_names`. `is_parallel`: there may be more than one."""

    tools: tuple[Mapping[str, Any], ...]
    callable_names: tuple[str, ...]
    must_call: bool = False
    is_parallel: bool = True
