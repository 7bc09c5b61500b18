"""Whether entry nodes guess tokens: a setting that every command names alike."""

from __future__ import annotations

from enum import StrEnum


class Speculate(StrEnum):
    """Whether tokens are guessed and checked several at a time: where that has proved faster, or never."""

    AUTO = "auto"
    OFF = "off"
