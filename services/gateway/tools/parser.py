"""Calls of tools in a text that comes in pieces.

What is found does not depend on how the text was cut. What begins as a call and turns out to be none is text. White
space around calls is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from services.gateway.tools.calls import Call
from services.gateway.tools.conventions import ARGS, CALL_ID, CALLS, CLOSE, OPEN, PYTHON_TAG, Writing
from services.gateway.tools.json_text import JsonEnd, is_text, parsed, written

_NAME = re.compile(rf"\s*([\w.-]{{1,128}})\s*(?:{re.escape(CALL_ID)}\s*\w*\s*)?")
# With all that stands before the arguments.
MAX_NAME_CHARS = 256
_IN_NAME = re.compile(rf"[\w.\s\[\]-]{{0,{MAX_NAME_CHARS}}}")

Found = list[str | Call]
_State = Callable[[bool], bool]


class CallParser:
    """`names` are those of the tools that there are."""

    def __init__(self, writing: Writing, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._is_llama = writing is Writing.LLAMA
        self._marker = OPEN if writing is Writing.HERMES else CALLS
        self._opening = "{" if writing in {Writing.HERMES, Writing.LLAMA} else "[{"
        self._buffer = ""
        self._state: _State = self._begins if self._is_llama else self._outside
        # What is text after all if no call comes of it, and the name, where that is written before the arguments.
        self._before = ""
        self._name: str | None = None
        self._end = JsonEnd()
        self._found: Found = []
        self._space = ""
        self.num_calls = 0

    def push(self, text: str) -> Found:
        """What is certain now."""
        self._buffer += text
        return self._run(is_last=False)

    def finish(self) -> Found:
        """The rest, at the end of the text."""
        found = self._run(is_last=True)
        if not self.num_calls and self._space:
            found.append(self._space)
        self._space = ""
        return found

    def _run(self, *, is_last: bool) -> Found:
        self._found = []
        while self._state(is_last):
            pass
        return self._found

    def _outside(self, is_last: bool) -> bool:
        place = self._buffer.find(self._marker)
        if place >= 0:
            self._text(self._buffer[:place])
            self._enter(self._marker, self._buffer[place + len(self._marker) :])
            return True
        kept = 0 if is_last else _overlap(self._buffer, self._marker)
        passed, self._buffer = self._buffer[: len(self._buffer) - kept], self._buffer[len(self._buffer) - kept :]
        self._text(passed)
        return False

    def _enter(self, before: str, buffer: str) -> None:
        self._before, self._buffer = before, buffer
        self._name, self._end = None, JsonEnd()
        self._state = self._inside

    def _inside(self, is_last: bool) -> bool:
        begun = self._buffer.lstrip()
        if not begun:
            return self._gives_up() if is_last else False
        if begun[0] in self._opening or self._name is not None:
            return self._in_json(is_last)
        if self._marker == CALLS:
            return self._in_name(is_last)
        return self._is_none()

    def _in_json(self, is_last: bool) -> bool:
        end = self._end.find(self._buffer)
        if end is None:
            return self._gives_up() if is_last else False
        body, rest = self._buffer[:end], self._buffer[end:]
        calls = self._calls(parsed(body))
        if calls is None:
            self._text(self._before + body)
            self._buffer, self._state = rest, self._plain if self._is_llama else self._outside
            return True
        self._space = ""
        for call in calls:
            self._found.append(Call(call.name, call.arguments, self.num_calls))
            self.num_calls += 1
        self._buffer, self._state = rest, self._between if self._is_llama else self._behind
        return True

    def _in_name(self, is_last: bool) -> bool:
        """`f[ARGS]`, before the arguments."""
        place = self._buffer.find(ARGS)
        if place < 0:
            if not is_last and _IN_NAME.fullmatch(self._buffer):
                return False
            return self._is_none()
        match = _NAME.fullmatch(self._buffer[:place])
        rest = self._buffer[place + len(ARGS) :]
        if match is None or place + len(ARGS) > MAX_NAME_CHARS:
            return self._is_none()
        if not rest.lstrip():
            return self._gives_up() if is_last else False
        if not rest.lstrip().startswith("{"):
            return self._is_none()
        self._before += self._buffer[: place + len(ARGS)]
        self._name, self._buffer = match[1], rest
        return True

    def _behind(self, is_last: bool) -> bool:
        """A call; the mark that closes it may be missing."""
        rest = self._buffer.lstrip()
        if self._marker == OPEN and rest.startswith(CLOSE):
            self._buffer, self._state = rest[len(CLOSE) :], self._outside
            return True
        if self._marker == OPEN and CLOSE.startswith(rest):
            self._buffer = "" if is_last else self._buffer
            return False
        self._state = self._outside
        return True

    def _begins(self, is_last: bool) -> bool:
        """Where a call is the whole text, or follows on another one."""
        rest = self._buffer.lstrip()
        if not is_last and PYTHON_TAG.startswith(rest):
            return False
        json_text = rest.removeprefix(PYTHON_TAG).lstrip()
        if not json_text and not is_last:
            return False
        if json_text.startswith("{"):
            self._enter(self._before + self._buffer[: len(self._buffer) - len(json_text)], json_text)
        else:
            self._text(self._before)
            self._state = self._plain
        return True

    def _between(self, is_last: bool) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        self._before = ""
        if rest[0] == ";":
            place = len(self._buffer) - len(rest) + 1
            self._before, self._buffer = self._buffer[:place], self._buffer[place:]
        self._state = self._begins if rest[0] in ";{" else self._plain
        return True

    def _plain(self, is_last: bool) -> bool:
        self._text(self._buffer)
        self._buffer = ""
        return False

    def _is_none(self) -> bool:
        """No call began here; one may begin in what follows."""
        self._text(self._before)
        self._state = self._outside
        return True

    def _gives_up(self) -> bool:
        """The text ends within a call."""
        self._text(self._before + self._buffer)
        self._buffer, self._state = "", self._plain
        return False

    def _text(self, text: str) -> None:
        """White space waits for what follows it."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._found.append(shown)

    def _calls(self, value: Any) -> list[Call] | None:
        """None: these are no calls."""
        if self._name is not None:
            value = {"name": self._name, "arguments": value}
        values = value if isinstance(value, list) else [value]
        calls = [self._call(one) for one in values]
        whole = [call for call in calls if call is not None]
        return whole if whole and len(whole) == len(calls) else None

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict):
            return None
        name = value.get("name")
        # An object that happens to have a name is more likely where nothing marks a call.
        arguments = value.get("arguments", value.get("parameters", None if self._is_llama else {}))
        if not isinstance(name, str) or not name or not is_text(name) or not isinstance(arguments, dict):
            return None
        if self._is_llama and name not in self._names:
            return None
        text = written(arguments)
        return None if text is None else Call(name, text)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of the text that the marker may begin with."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
