"""The kinds of grammar that a text can be kept to, by the names of the fields that carry them on the wire."""

from __future__ import annotations

from enum import StrEnum


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    LARK = "lark"
    REGEX = "regex"
