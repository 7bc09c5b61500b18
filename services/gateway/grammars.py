"""What a text must be, as it is asked of the mesh."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from meshnet.grammars import GrammarKind


@dataclass(frozen=True, slots=True)
class Grammar:
    """`param` is the field of the request that it came from."""

    kind: GrammarKind
    text: str
    param: str


# A model may break lines and indent, or write all in one line, but not fill its answer with white space, as small ones
# do that may.
_WHITE_SPACE = MappingProxyType(
    {
        "whitespace_flexible": False,
        "item_separator": r",(\x20|\n\x20{0,16})?",
        "key_separator": r":\x20?",
    }
)
ANY_OBJECT: Mapping[str, Any] = MappingProxyType({"type": "object"})


def schema_text(schema: Any) -> str:
    """A JSON schema as the mesh takes it. One that says how white space is to be (`x-guidance`) stays as it is."""
    if isinstance(schema, Mapping):
        schema = {"x-guidance": dict(_WHITE_SPACE), **schema}
    return json.dumps(schema)


def json_grammar(schema: Any, param: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(schema), param)


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """One of several texts."""
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(map(quoted, choices)), param)


def quoted(text: str) -> str:
    """A text in a Lark grammar."""
    return json.dumps(text)
