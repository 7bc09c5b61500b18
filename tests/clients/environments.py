"""Virtual environments of clients, outside the tree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

INSTALL_SECONDS = 1800.0
RUN_SECONDS = 900.0
# Where a client needs them, of the same release as here: scores are compared.
_SAME = ("torch", "transformers")


class ClientFailed(Exception):
    """A client ended with an error. The message has the end of what it printed."""


@dataclass(frozen=True)
class Environment:
    """The environment of the client `name`, whose first package is the client itself."""

    name: str
    folder: Path
    packages: tuple[str, ...]

    @property
    def home(self) -> Path:
        """Where it runs: its settings, caches and log are here."""
        return self.folder / f"{self.name}-run"

    @property
    def bin(self) -> Path:
        return self.folder / self.name / "bin"

    def install(self) -> None:
        """Makes it, unless it is there. Raises CalledProcessError."""
        self.home.mkdir(parents=True, exist_ok=True)
        if (self.bin / "installed").exists():
            return
        print(f"installing {', '.join(self.packages)} into {self.bin.parent}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.bin.parent)], check=True, timeout=INSTALL_SECONDS)
        constraints = self.home / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version(name)}\n" for name in _SAME))
        command = [str(self.bin / "pip"), "install", "--quiet", "-c", str(constraints), *self.packages]
        subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
        (self.bin / "installed").touch()

    @property
    def version(self) -> str:
        name = self.packages[0].partition("[")[0]
        code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
        command = [str(self.bin / "python"), "-c", code]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def run(self, command: Sequence[str], given: str = "", **settings: str) -> str:
        """What a command of the environment prints, with `settings` as environment variables and `given` as its input.

        Raises ClientFailed if it ends with an error, or TimeoutExpired.
        """
        # Nothing of the user's own settings, keys or proxies: what is tried is the same everywhere.
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        own = {"HOME": str(self.home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        ended = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.home,
            env={**kept, **own, **settings},
            input=given,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        with (self.home / "log").open("a") as log:
            log.write(f"$ {' '.join(command)}\n{ended.stdout}{ended.stderr}\n")
        if ended.returncode:
            raise ClientFailed(f"exit code {ended.returncode}: {(ended.stderr or ended.stdout)[-1500:]}")
        return ended.stdout
