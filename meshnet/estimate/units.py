"""Rates and times as people write them."""

from __future__ import annotations

import re

from meshnet.errors import InvalidRequest
from meshnet.sizes import parse_size

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BIT_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:bit/s|bps)", re.IGNORECASE)
_COMPUTE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)FLOP(?:S|/s)", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
BITS = 8


def parse_byte_rate(text: str) -> float:
    """Bytes a second, from `40GB/s`. Raises InvalidRequest."""
    size, slash, second = text.rpartition("/")
    try:
        rate = float(parse_size(size)) if slash and second.strip() == "s" and not size.strip().isdigit() else 0.0
    except InvalidRequest:
        rate = 0.0
    if rate <= 0:
        raise InvalidRequest(f"{text!r} is no rate of bytes: write for example 40GB/s")
    return rate


def parse_link_rate(text: str) -> float:
    """Bytes a second, from `1Gbit/s` or `110MB/s`. Raises InvalidRequest."""
    if match := _BIT_RATE.fullmatch(text.strip()):
        rate = float(match[1]) * _PREFIXES[match[2].upper()] / BITS
        if rate > 0:
            return rate
    try:
        return parse_byte_rate(text)
    except InvalidRequest:
        raise InvalidRequest(f"{text!r} is no rate of a link: write for example 1Gbit/s or 110MB/s") from None


def parse_compute(text: str) -> float:
    """Operations a second, from `2TFLOPS`. Raises InvalidRequest."""
    match = _COMPUTE.fullmatch(text.strip())
    rate = float(match[1]) * _PREFIXES[match[2].upper()] if match else 0.0
    if rate <= 0:
        raise InvalidRequest(f"{text!r} is no speed of computing: write for example 2TFLOPS or 150GFLOPS")
    return rate


def parse_time(text: str) -> float:
    """Seconds, from `0.2ms`, `80us` or `1s`. Raises InvalidRequest."""
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise InvalidRequest(f"{text!r} is no time: write for example 0.2ms, 80us or 1s")
    return float(match[1]) * _SECONDS[match[2]]


def parse_count(text: str) -> float:
    """A number above 0, from `2` or `1.5`. Raises InvalidRequest."""
    try:
        count = float(text)
    except ValueError:
        count = 0.0
    if not 0 < count < float("inf"):
        raise InvalidRequest(f"{text!r} is no number above 0")
    return count
