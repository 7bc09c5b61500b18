"""Parts of files over HTTP, bounded in size and time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import httpx

from meshnet.security.bearer import bearer
from meshnet.security.shared_secret import SharedSecret
from services.node.fetching.source import CONNECT_SECONDS, STALL_SECONDS, SourceFailed, longest_seconds

MAX_ERROR_BYTES = 64 << 10
MAX_REDIRECTS = 5


def make_client(*, follow_redirects: bool, connections: int = 1, secret: SharedSecret | None = None) -> httpx.Client:
    """Weights do not get smaller by compression, and ranges are of the bytes as they are. `secret`: of the mesh, for
    what is asked of its members only."""
    return httpx.Client(
        timeout=httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS),
        headers={"Accept-Encoding": "identity"},
        auth=bearer(secret),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        follow_redirects=follow_redirects,
        max_redirects=MAX_REDIRECTS,
        trust_env=follow_redirects,
    )


def stream_range(
    client: httpx.Client, url: str, begin: int, end: int, headers: Mapping[str, str] | None = None
) -> Iterator[bytes]:
    """Bytes `[begin, end)` of what is at the URL. Raises SourceFailed."""
    wanted = {**(headers or {}), "Range": f"bytes={begin}-{end - 1}"}
    deadline, left = time.monotonic() + longest_seconds(end - begin), end - begin
    try:
        with client.stream("GET", url, headers=wanted) as answer:
            check_status(answer, 206)
            if not answer.headers.get("Content-Range", "").startswith(f"bytes {begin}-{end - 1}/"):
                raise SourceFailed(f"it answered with {answer.headers.get('Content-Range')!r} instead of the range")
            for chunk in answer.iter_raw():
                left -= len(chunk)
                if left < 0:
                    raise SourceFailed("it sent more than the range")
                yield chunk
                if time.monotonic() > deadline:
                    raise SourceFailed(
                        f"it is too slow: {end - begin} bytes took over {longest_seconds(end - begin):.0f} s"
                    )
    except httpx.HTTPError as error:
        raise SourceFailed(said(error)) from error
    if left:
        raise SourceFailed(f"it ended {left} bytes too early")


def read_bounded(answer: httpx.Response, limit: int, seconds: float) -> bytes:
    """A body of at most so many bytes. Raises SourceFailed."""
    deadline, body = time.monotonic() + seconds, bytearray()
    for chunk in answer.iter_raw():
        body += chunk
        if len(body) > limit:
            raise SourceFailed(f"its answer is over {limit} bytes")
        if time.monotonic() > deadline:
            raise SourceFailed(f"its answer took over {seconds:g} s")
    return bytes(body)


def check_status(answer: httpx.Response, expected: int) -> None:
    """Raises SourceFailed with what the answer says, if it has another status."""
    if answer.status_code != expected:
        body = read_bounded(answer, MAX_ERROR_BYTES, STALL_SECONDS)
        raise SourceFailed(f"it answered {answer.status_code}: {body[:300].decode('utf-8', 'replace')}")


def said(error: Exception) -> str:
    return str(error) or type(error).__name__
