"""A program at a real terminal, as a person has it: keys go in, what the screen is told comes out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.processes import ROOT

CTRL_C, CTRL_D, UP, TAB, ENTER = "\x03", "\x04", "\x1b[A", "\t", "\r"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")
# Only who has the terminal as its own gets signals from its keys.
_WITH_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """`python ARGS` at a terminal of 100 columns. Leaving it kills the program if it still runs."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._keyboard, screen = pty.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WITH_TERMINAL, *arguments],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
            start_new_session=True,
        )
        os.close(screen)
        self._shown = ""
        self._num_read = 0

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """All that is shown up to this text, from where the last call left off, without colours. Raises AssertionError
        if it does not come."""
        deadline = time.monotonic() + seconds
        while (at := self._shown.find(text, self._num_read)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self._shown[self._num_read :]!r}"
            assert self._read(), f"it ended before {text!r}: {self._shown[self._num_read :]!r}"
        seen = self._shown[self._num_read : at]
        self._num_read = at + len(text)
        return seen

    def wait_for_end(self, seconds: float = 30.0) -> int:
        """Its exit code. Raises TimeoutExpired."""
        while self._read():
            pass
        return self.process.wait(seconds)

    def _read(self) -> bool:
        """Waits a moment for more to be shown. Returns False at the end."""
        ready, _, _ = select.select([self._keyboard], [], [], 0.1)
        if not ready:
            return self.process.poll() is None
        try:
            self._shown = _ESCAPES.sub("", self._shown + os.read(self._keyboard, 65536).decode(errors="replace"))
        except OSError:  # nobody has the terminal open any more
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._keyboard)
