"""Tokens as text. What is wrong with one is said without saying the token."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Callable, Sequence
from hmac import compare_digest
from typing import Final

from meshnet.errors import InvalidRequest

# So that people, and programs that look for secrets in the wrong places, know one when they see it.
PREFIX: Final = "meshnet_"
NUM_RANDOM_BYTES: Final = 32
# Made elsewhere, a token must still be one that nobody guesses and that fits into a header.
MIN_CHARS, MAX_CHARS = 32, 512
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
_SCHEME: Final = "Bearer"


def make_token(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(random_bytes(NUM_RANDOM_BYTES)).rstrip(b"=").decode("ascii")


def check_token(text: str) -> str:
    """Raises InvalidRequest."""
    if not MIN_CHARS <= len(text) <= MAX_CHARS:
        raise InvalidRequest(f"a token has {MIN_CHARS} to {MAX_CHARS} characters, not {len(text)}")
    if not _TOKEN.fullmatch(text):
        raise InvalidRequest("a token consists of letters, digits and -._~+/= alone")
    return text


def authorization(token: str) -> str:
    """As a header, or as gRPC metadata, shows it."""
    return f"{_SCHEME} {token}"


def shown_token(header: str) -> bytes:
    """What an Authorization header shows, which may be anything; empty if it is of another scheme."""
    scheme, _, token = header.strip().partition(" ")
    return token.strip().encode("utf-8", "backslashreplace") if scheme.lower() == _SCHEME.lower() else b""


def is_one_of(shown: bytes, tokens: Sequence[bytes]) -> bool:
    """All are compared, each in a time that does not depend on where they differ."""
    return sum(compare_digest(shown, token) for token in tokens) > 0
