"""Starts real services for tests, waits until they are ready, and stops them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

ROOT = Path(__file__).parents[1]
POLL_SECONDS = 0.02
STOP_SECONDS = 10.0


class RunningProcess:
    """A process that has said that it is ready. `match` is of the line that said so. Also a context manager: leaving it
    stops the process and requires a clean exit."""

    def __init__(self, process: subprocess.Popen[bytes], output: IO[bytes], match: re.Match[str]) -> None:
        self.process = process
        self.match = match
        self._output = output

    def output(self) -> str:
        """All that it has written so far, standard output and error together."""
        return _read(self._output)

    def wait_for(self, pattern: str, timeout: float = 10.0) -> re.Match[str]:
        """The first match in its output, once there is one. Raises AssertionError with the output after `timeout` s."""
        return _wait(self.process, self._output, re.compile(pattern), timeout)

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """SIGTERM, then requires that it ends in time with exit code 0."""
        self.process.terminate()
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running {timeout} s after SIGTERM; its output:\n{self.output()}") from None
        assert code == 0, f"exit code {code}; its output:\n{self.output()}"

    def kill(self) -> None:
        """SIGKILL: the process dies as if its machine had."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> RunningProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.process.poll() is not None:
                return
            if kind is None:
                self.stop()
            else:
                self.kill()
        finally:
            self._output.close()


def start(
    args: list[str],
    ready: re.Pattern[str],
    timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> RunningProcess:
    """Starts `PREFIX python ARGS` in the repository root and waits for a line that matches `ready`.

    Raises AssertionError with the process's output if it ends first or is not ready within `timeout` seconds.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115 (RunningProcess closes it)
    process = subprocess.Popen(
        [*prefix, sys.executable, *args],
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
    )
    try:
        return RunningProcess(process, output, _wait(process, output, ready, timeout))
    except BaseException:
        process.kill()
        process.wait()
        output.close()
        raise


def wait_until(
    condition: Callable[[], object], seconds: float = 20.0, what: str = "the condition", logs: Callable[[], str] = str
) -> None:
    """Waits for a condition of other processes, which can only be asked for again and again.

    Raises AssertionError with the logs if it does not come true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{logs()}"
        time.sleep(POLL_SECONDS)


def _wait(
    process: subprocess.Popen[bytes], output: IO[bytes], pattern: re.Pattern[str], timeout: float
) -> re.Match[str]:
    deadline = time.monotonic() + timeout
    while True:
        ended = process.poll() is not None
        if match := pattern.search(_read(output)):
            return match
        assert not ended, f"ended with exit code {process.returncode} before {pattern.pattern!r}:\n{_read(output)}"
        assert time.monotonic() < deadline, f"no {pattern.pattern!r} within {timeout} s:\n{_read(output)}"
        time.sleep(POLL_SECONDS)


def _read(output: IO[bytes]) -> str:
    # Not through the file's own offset: the process writes at that one.
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), size, 0).decode("utf-8", "replace")
