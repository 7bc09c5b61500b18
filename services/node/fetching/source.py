"""Where weights can be fetched from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from services.node.files.description import Description

CONNECT_SECONDS = 5.0
# Nothing came for so long.
STALL_SECONDS = 20.0
# Beside so many seconds, a source may take a second for each of so many bytes.
GRACE_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 32 << 10


class SourceFailed(Exception):
    """A source did not give what it was asked for; the text says why, for people."""


class SourceWrong(SourceFailed):
    """What it gave is not what the model's revision says: it is not asked again."""


class Source(Protocol):
    """One revision of one model somewhere else. Blocks; for the thread that fetches. Raises SourceFailed."""

    @property
    def name(self) -> str:
        """For people: `node alpha`."""
        ...

    def describe(self) -> Description: ...

    def stream(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        """Bytes `[begin, end)` of a file, in pieces of any size, never more of them."""
        ...

    def digests(self, names: Collection[str]) -> Mapping[str, str] | None:
        """SHA-256 of all bytes of each of these tensors. None: the source does not tell."""
        ...


def longest_seconds(num_bytes: int) -> float:
    """What a transfer of so many bytes may take at most."""
    return GRACE_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND
