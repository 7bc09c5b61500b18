"""JSON in text that comes in pieces."""

from __future__ import annotations

import json
from typing import Any, NoReturn


class JsonEnd:
    """Finds where an object or an array ends. It sees brackets and strings, and does not know what is between them."""

    def __init__(self) -> None:
        self._seen = self._depth = 0
        self._in_string = self._is_escaped = False

    def find(self, text: str) -> int | None:
        """`text` is what it was before, and more. Behind the bracket that closes the first one; None: not there yet."""
        for index in range(self._seen, len(text)):
            if self._closes(text[index]):
                return index + 1
        self._seen = len(text)
        return None

    def _closes(self, character: str) -> bool:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            else:
                self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


def parsed(text: str) -> Any:
    """None for what is no JSON, as for null."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def written(value: Any) -> str | None:
    """JSON as text; None for what JSON has no words for."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    # Halves of a character may be escaped in JSON, but are no text.
    return text if is_text(text) else json.dumps(value, allow_nan=False)


def is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
