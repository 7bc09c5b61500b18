"""The file of a mesh's tokens: one a line, of which the first is sent and all are accepted.

So a token is changed without a pause: everybody accepts the new one, then everybody sends it, then nobody accepts the
old one.
"""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshnet.errors import InvalidRequest
from meshnet.security.tokens import check_token

MAX_TOKENS = 8
MAX_FILE_BYTES = 16 << 10
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

Stamp = tuple[int, int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Another one once somebody has written to the file or changed who may read it. None: it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_tokens(path: Path) -> tuple[str, ...]:
    """At least one. Raises InvalidRequest, which says what to do."""
    try:
        with path.open("rb") as file:
            _check_mode(path, os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InvalidRequest(f"there is no token file {path}: `meshnet token {_quoted(path)}` makes one") from None
    except OSError as error:
        raise InvalidRequest(f"the token file {path} cannot be read: {error.strerror or error}") from None
    return _parse(path, content)


def create_file(path: Path, tokens: Sequence[str]) -> None:
    """For its owner alone. Raises FileExistsError, or another OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    _write(descriptor, tokens)


def replace_file(path: Path, tokens: Sequence[str]) -> None:
    """Whole or not at all, for its owner alone. Raises OSError."""
    # Not in the place of a link: what it points at is what others read.
    path = path.resolve()
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # with mode 0600
    try:
        _write(descriptor, tokens)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def _write(descriptor: int, tokens: Sequence[str]) -> None:
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write("".join(f"{token}\n" for token in tokens))
        file.flush()
        os.fsync(file.fileno())


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise InvalidRequest(f"the token file {path} is not a file")
    # Elsewhere the mode does not tell who may read.
    if os.name == "posix" and mode & _OTHERS:
        raise InvalidRequest(
            f"others than its owner have access to the token file {path} (mode {stat.S_IMODE(mode):04o}): "
            f"`chmod 600 {_quoted(path)}` ends that. If somebody may have read it, rotate the token."
        )


def _parse(path: Path, content: bytes) -> tuple[str, ...]:
    if len(content) > MAX_FILE_BYTES:
        raise InvalidRequest(f"the token file {path} is over {MAX_FILE_BYTES} bytes: one token a line is all it has")
    tokens: list[str] = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        if line.strip():
            try:
                tokens.append(check_token(line.strip()))
            except InvalidRequest as error:
                raise InvalidRequest(f"the token file {path}, line {number}: {error}") from None
    if not tokens:
        raise InvalidRequest(
            f"the token file {path} has no token: remove it, `meshnet token {_quoted(path)}` makes one"
        )
    if len(tokens) > MAX_TOKENS:
        raise InvalidRequest(f"the token file {path} has {len(tokens)} tokens, at most {MAX_TOKENS} are allowed")
    return tuple(tokens)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
