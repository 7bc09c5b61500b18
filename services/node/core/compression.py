"""Whether a body is compressed on its way: where the link takes longer than both ends. Pure; times in seconds."""

from __future__ import annotations

from enum import StrEnum

from meshnet.wire import Encoding


class Compression(StrEnum):
    """Frames to other nodes are compressed where that has proved faster, never, or always."""

    AUTO = "auto"
    OFF = "off"
    ZSTD = "zstd"


# Less is sent as soon as it is looked at.
MIN_BYTES = 4 << 10
# Before anything was compressed here: what activations of a small model gave, and one core of a server.
PRIOR_RATIO, PRIOR_BYTES_PER_SECOND = 1.27, 700e6
# The other end is so many times as fast.
INFLATING = 1.4
SMOOTHING = 0.1
# What does not pay is not tried, and what pays is seen to: a link that is as fast as compression stays as it is.
MIN_GAIN = 1.1


class CompressionChoice:
    """Of one node, for all links. `auto` learns from each body that was compressed."""

    def __init__(self, setting: Compression) -> None:
        self._setting = setting
        self._ratio, self._bytes_per_second = PRIOR_RATIO, PRIOR_BYTES_PER_SECOND

    def choose(self, num_bytes: int, link_bytes_per_second: float | None) -> Encoding | None:
        """For a body of so many bytes over a link whose throughput may not be known yet."""
        if self._setting is not Compression.AUTO:
            return Encoding.ZSTD if self._setting is Compression.ZSTD else None
        if num_bytes < MIN_BYTES or not link_bytes_per_second:
            return None
        plain = 1 / link_bytes_per_second
        both_ends = (1 + 1 / INFLATING) / self._bytes_per_second
        return Encoding.ZSTD if plain > MIN_GAIN * (plain / self._ratio + both_ends) else None

    def observe(self, num_bytes: int, num_sent: int, seconds: float) -> None:
        """What compressing a body came to."""
        if num_bytes >= MIN_BYTES and num_sent and seconds > 0:
            self._ratio += SMOOTHING * (num_bytes / num_sent - self._ratio)
            self._bytes_per_second += SMOOTHING * (num_bytes / seconds - self._bytes_per_second)
