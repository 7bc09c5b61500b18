"""Byte counts as people write and read them."""

from __future__ import annotations

import re

from meshnet.errors import InvalidRequest

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from `8GiB`, `500MB`, `1.5G` or a plain number. Raises InvalidRequest."""
    match = _SIZE.fullmatch(text)
    if not match or match[2].upper() not in _UNITS:
        raise InvalidRequest(f"{text!r} is not a size: write for example 8GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_size(num_bytes: int) -> str:
    """`num_bytes` with a decimal unit, for people: `71.2 MB`."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
