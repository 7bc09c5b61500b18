"""What a frame is: the names of its headers, its limits, and its headers as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from meshnet.model import LayerRange
from meshnet.topology import Hop

WIRE_VERSION: Final = 1

CONTENT_TYPE: Final = "application/octet-stream"
DTYPE_NAME: Final = "bfloat16"
BYTES_PER_ELEMENT: Final = 2

SHAPE: Final = "X-Meshnet-Shape"
DTYPE: Final = "X-Meshnet-Dtype"
SESSION: Final = "X-Meshnet-Session"
CHUNK_INDEX: Final = "X-Meshnet-Chunk-Index"
CHUNK_TOTAL: Final = "X-Meshnet-Chunk-Total"
ENCODING: Final = "X-Meshnet-Encoding"
VERSION: Final = "X-Meshnet-Wire-Version"
MODEL: Final = "X-Meshnet-Model"
POSITION: Final = "X-Meshnet-Position"
LAYERS: Final = "X-Meshnet-Layers"
ROUTE: Final = "X-Meshnet-Route"
RETURN: Final = "X-Meshnet-Return"
ENTRY: Final = "X-Meshnet-Entry"
TICKET: Final = "X-Meshnet-Ticket"
PREFIX: Final = "X-Meshnet-Prefix"
DIGEST: Final = "X-Meshnet-Digest"

# Of requests that end a session.
KEEP: Final = "X-Meshnet-Keep"

# Of error answers only.
CACHED_LENGTH: Final = "X-Meshnet-Cached-Length"
FAILED_NODE: Final = "X-Meshnet-Failed-Node"

MAX_ROWS: Final = 1024
MAX_POSITIONS: Final = 1 << 20
MAX_HIDDEN: Final = 1 << 20
MAX_FRAME_BYTES: Final = 1 << 30
MAX_CHUNKS: Final = 1 << 20
MAX_CACHED: Final = 1 << 30
MAX_LAYERS: Final = 1 << 16
MAX_HOPS: Final = 256

# Room for the longest lists above: 1024 UUIDs take 37 KiB. A server must let a header field be as long as this.
MAX_FIELD_CHARS: Final = 64 << 10


class Encoding(StrEnum):
    """How a body is packed. A raw body has no encoding."""

    ZSTD = "zstd"


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that a new session has in common with another one: `num_tokens`, whole blocks, whose KV cache `session`
    has left. `take`: the new session continues that cache, and nobody else needs it; otherwise it is copied."""

    session: str
    num_tokens: int
    take: bool


@dataclass(frozen=True, slots=True)
class FrameHeaders:
    """The headers of one frame; the body is `[rows, positions, hidden]` bfloat16, little-endian, row-major.

    `sessions` are lower-case UUIDs, one a row. `cached` is, for each row, the number of tokens in the session's
    KV cache before this frame (None: what is cached). `layers` is what the sender expects this hop to run (None:
    its shard), `route` the hops after it. `returns` is how many trailing positions come back (None: all). `entry`
    is the node at which the sessions begin (None: not said). `ticket`: what comes back goes straight from the last hop
    to the entry, which knows it by this (None: it goes back through the hops). `prefix`: what is before the first frame
    of a session is not computed but reused.

    `parse_headers` checks what strangers send; who builds one in code answers for its values.
    """

    rows: int
    positions: int
    hidden: int
    sessions: tuple[str, ...]
    chunk_index: int = 0
    chunk_total: int = 1
    encoding: Encoding | None = None
    model: str | None = None
    cached: tuple[int, ...] | None = None
    layers: LayerRange | None = None
    route: tuple[Hop, ...] = ()
    returns: int | None = None
    entry: str | None = None
    ticket: str | None = None
    prefix: Prefix | None = None

    @property
    def elements(self) -> int:
        return self.rows * self.positions * self.hidden

    @property
    def num_returned(self) -> int:
        """Positions of each row that come back."""
        return self.positions if self.returns is None else self.returns

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded body."""
        return self.elements * BYTES_PER_ELEMENT

    def encoded_as(self, encoding: Encoding | None) -> FrameHeaders:
        """The frame with its body so encoded: itself, if it is so already."""
        return self if self.encoding is encoding else replace(self, encoding=encoding)
