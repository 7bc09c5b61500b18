"""Child processes that start together, are watched together and end together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from meshnet.service import EXIT_WITH_PARENT

STOP_SECONDS = 10.0
TAIL_LINES = 12


class ProcessFailed(Exception):
    """A child ended, or was not ready in time; the message has the end of its log."""


@dataclass(slots=True)
class Child:
    """A service process. `ready` is set when its first line is out. `log_path` None: it logs to this terminal."""

    name: str
    process: subprocess.Popen[str]
    log_path: Path | None
    ready: threading.Event = field(default_factory=threading.Event)
    first_line: str = ""

    def tail(self) -> str:
        """How its log ends, for people."""
        if self.log_path is None:
            return "(its log is above)"
        lines = self.log_path.read_text("utf-8", "replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


class Processes:
    """Services of this machine, each with a log file in `log_dir`, or without one and logging to this terminal."""

    def __init__(self, log_dir: Path | None) -> None:
        self.log_dir = log_dir
        self._children: list[Child] = []

    def start(self, name: str, module: str, arguments: Sequence[str]) -> Child:
        """Starts `python -m module` in a session of its own, so that Ctrl-C reaches it only through `stop`."""
        log_path = self.log_dir / f"{name}.log" if self.log_dir else None
        log = log_path.open("w", encoding="utf-8") if log_path else os.fdopen(os.dup(2), "w", encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, EXIT_WITH_PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        )
        child = Child(name, process, log_path)
        self._children.append(child)
        threading.Thread(target=_drain, args=(child, log), daemon=True).start()
        return child

    def wait_ready(self, child: Child, pattern: str, seconds: float) -> re.Match[str]:
        """The match in the line that a child prints when it listens. Raises ProcessFailed."""
        deadline = time.monotonic() + seconds
        while not child.ready.wait(0.05):
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{child.name} was not ready within {seconds:g} s; its log ends:\n{child.tail()}")
        match = re.search(pattern, child.first_line)
        if not match:
            self.check()
            raise ProcessFailed(f"{child.name} said {child.first_line!r}; its log ends:\n{child.tail()}")
        return match

    def check(self) -> None:
        """Raises ProcessFailed if any child has ended."""
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                raise ProcessFailed(f"{child.name} ended with code {code}; its log ends:\n{child.tail()}")

    def stop(self) -> None:
        """Asks all to end, the last started first, and kills what does not in time. Nothing is left running."""
        for child in reversed(self._children):
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children:
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._children.clear()


def _drain(child: Child, log: IO[str]) -> None:
    with log:
        for line in child.process.stdout or ():
            log.write(line)
            log.flush()
            if not child.first_line:
                child.first_line = line.strip()
                child.ready.set()
    child.ready.set()
