"""Digests of messages with a frame: what a link or a box on the way has changed is refused and sent again.

TCP's own sum is 16 bits wide, and is made anew by every proxy. This one tells accidents, not malice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from meshnet.errors import CorruptFrame
from meshnet.wire.body import Buffer
from meshnet.wire.frame import DIGEST
from meshnet.wire.headers import KEYS

DIGEST_KEY: Final = DIGEST.lower()
_NAMES: Final = tuple((name, name.lower()) for name in KEYS)


def seal(headers: dict[str, str], body: Buffer) -> dict[str, str]:
    """Adds the digest of a frame's headers (see `format_headers`) and its body as sent."""
    headers[DIGEST] = _digest([headers.get(name, "") for name, _ in _NAMES], body)
    return headers


def check_digest(fields: Mapping[str, str], body: Buffer) -> None:
    """`fields` by lower-case name. Raises CorruptFrame if they or the body are not what was sealed; what has no digest
    is not checked."""
    claimed = fields.get(DIGEST_KEY)
    if claimed is not None and claimed != _digest([fields.get(key, "") for _, key in _NAMES], body):
        raise CorruptFrame("the frame is not what was sent: its digest is another")


def _digest(values: list[str], body: Buffer) -> str:
    return xxh3_64_hexdigest(body, seed=xxh3_64_intdigest("\n".join(values).encode()))
