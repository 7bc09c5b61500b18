"""The secret of a mesh in a running process: shown to others, asked of others, read again when its file changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshnet.errors import InvalidRequest, Unauthenticated
from meshnet.security.token_file import read_tokens, stamp_of
from meshnet.security.tokens import authorization, is_one_of, shown_token

# Of what comes in, so often is the file looked at; and whenever a token is not accepted.
LOOK_SECONDS = 1.0
# Where a token is shown, in HTTP and in gRPC.
HEADER = "Authorization"
KEY = HEADER.lower()
_HOW = (
    f"`{HEADER}: Bearer TOKEN`, in gRPC as metadata. Commands and services of meshnet send it if they are given "
    "--token-file FILE or MESHNET_TOKEN_FILE"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tokens:
    authorization: str
    accepted: tuple[bytes, ...]


class SharedSecret:
    """What a token file holds. For all threads. A file that can no longer be read changes nothing but the log.

    Raises InvalidRequest if it cannot be read at the start.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._looking = threading.Lock()
        self._stamp = stamp_of(path)
        self._tokens = _read(path)
        self._look_at = clock() + LOOK_SECONDS

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def authorization(self) -> str:
        """What to show others, as the file says it now: whoever is behind a rotation would be refused."""
        self._look()
        return self._tokens.authorization

    def check(self, header: str | None) -> None:
        """`header`: the Authorization of a request, None if it has none. Raises Unauthenticated."""
        if header is None:
            raise Unauthenticated(f"this mesh has a token, and the request shows none: send {_HOW}")
        if not self._accepts(shown_token(header)):
            raise Unauthenticated(f"what the request shows is not a token of this mesh: send {_HOW}")

    def _accepts(self, shown: bytes) -> bool:
        if self._clock() >= self._look_at:
            self._look()
        if is_one_of(shown, self._tokens.accepted):
            return True
        self._look()
        return is_one_of(shown, self._tokens.accepted)

    def _look(self) -> None:
        self._look_at = self._clock() + LOOK_SECONDS
        # Who looks while another thread reads waits for what it finds.
        with self._looking:
            stamp = stamp_of(self.path)
            if stamp != self._stamp:
                # First: what is written meanwhile has another one.
                self._stamp = stamp
                self._read_again()

    def _read_again(self) -> None:
        try:
            tokens = _read(self.path)
        except InvalidRequest as error:
            log.error("the tokens stay what they were: %s", error)  # noqa: TRY400 (the message is the point)
            return
        if tokens != self._tokens:
            self._tokens = tokens
            log.info("the tokens in %s have changed: %d accepted", self.path, len(tokens.accepted))


def _read(path: Path) -> _Tokens:
    tokens = read_tokens(path)
    return _Tokens(authorization(tokens[0]), tuple(token.encode("ascii") for token in tokens))
