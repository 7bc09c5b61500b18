"""A gateway as its users run it: a process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx

from tests import processes

LISTENING = re.compile(r"^meshnet gateway listening on (http://\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Gateway:
    process: processes.RunningProcess
    url: str

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port


@contextlib.contextmanager
def running_gateway(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Gateway]:
    """Leaving it stops the gateway and requires a clean exit. What fails under a stream is not tried again for long."""
    args = ["-m", "services.gateway", "--listen", "127.0.0.1:0", "--resume-timeout", "1", *arguments]
    with processes.start(args, LISTENING, timeout=60, env=env) as process:
        yield Gateway(process, process.match[1])
