"""podman or docker, as the trial of compose.yaml uses them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

PROJECT = "meshnet-try"
SERVICES = ("tracker-node", "node-a", "node-b")
TOKEN_FILE = "/var/lib/meshnet/token"  # noqa: S105 (where it is)
BUILD_SECONDS = 1800.0
COMMAND_SECONDS = 120.0
LOG_LINES = 40


class TrialFailed(Exception):
    """What went wrong, for people."""


@dataclass(frozen=True, slots=True)
class Engine:
    """`name` is podman or docker; `compose` is the command that reads compose files."""

    name: str
    compose: tuple[str, ...]
    repository: Path

    def build(self, image: str, base: str | None) -> float:
        """Builds the image; returns the seconds it took. pip in it is set up as pip is here. Raises TrialFailed."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="meshnet-pip-") as folder:
            command = [self.name, "build", "--tag", image]
            if base:
                command += ["--build-arg", f"BASE={base}"]
            if self.name == "podman":
                command += ["--network", "host", *_pip_mounts(Path(folder))]
            self._run([*command, str(self.repository)], seconds=BUILD_SECONDS, shown=True)
        return time.monotonic() - started

    def image_size(self, image: str) -> int:
        """Bytes."""
        return int(self._run([self.name, "image", "inspect", "--format", "{{.Size}}", image]))

    @contextmanager
    def mesh(self, environment: Mapping[str, str]) -> Iterator[None]:
        """All services in containers, gone afterwards. If the trial fails, the ends of their logs are shown."""
        variables = {**os.environ, **environment}
        project = [*self.compose, "--project-name", PROJECT, "--file", str(self.repository / "compose.yaml")]
        try:
            self._run([*project, "up", "--detach", "--no-build"], variables)
            yield
        except TrialFailed:
            self._show_logs()
            raise
        finally:
            self._run([*project, "down", "--volumes"], variables)

    def is_healthy(self, service: str) -> bool:
        """podman runs health checks by itself only under systemd: there it is run now."""
        if self.name == "podman":
            command = [self.name, "healthcheck", "run", self._container(service)]
            return subprocess.run(command, capture_output=True, timeout=COMMAND_SECONDS, check=False).returncode == 0
        return self._inspect(service, "{{.State.Health.Status}}") == "healthy"

    def token(self) -> str:
        """Of the mesh, which its clients need."""
        return self._run([self.name, "exec", self._container("tracker-node"), "head", "-n", "1", TOKEN_FILE])

    def stop(self) -> dict[str, int]:
        """Asks all to end with SIGTERM; returns the exit codes by service. 137 means that one had to be killed."""
        containers = [self._container(service) for service in SERVICES]
        self._run([self.name, "stop", "--time", "20", *containers])
        return {service: int(self._inspect(service, "{{.State.ExitCode}}")) for service in SERVICES}

    def _inspect(self, service: str, template: str) -> str:
        return self._run([self.name, "inspect", "--format", template, self._container(service)])

    def _container(self, service: str) -> str:
        labels = {"com.docker.compose.project": PROJECT, "com.docker.compose.service": service}
        filters = [part for key, value in labels.items() for part in ("--filter", f"label={key}={value}")]
        containers = self._run([self.name, "ps", "--all", "--quiet", *filters]).split()
        if len(containers) != 1:
            raise TrialFailed(f"{service} has {len(containers)} containers, not one")
        return containers[0]

    def _show_logs(self) -> None:
        for service in SERVICES:
            print(f"--- {service}", file=sys.stderr, flush=True)
            try:
                command = [self.name, "logs", "--tail", str(LOG_LINES), self._container(service)]
                subprocess.run(command, stdout=sys.stderr, timeout=COMMAND_SECONDS, check=False)
            except TrialFailed as failure:
                print(failure, file=sys.stderr)

    def _run(
        self,
        command: list[str],
        variables: Mapping[str, str] | None = None,
        *,
        seconds: float = COMMAND_SECONDS,
        shown: bool = False,
    ) -> str:
        """Output of a command. Raises TrialFailed if it fails or takes too long."""
        output = None if shown else subprocess.PIPE
        try:
            done = subprocess.run(
                command, stdout=output, stderr=output, env=variables, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"{' '.join(command)} has not ended after {seconds:g} s") from None
        if done.returncode != 0:
            raise TrialFailed(f"{' '.join(command)} ended with code {done.returncode}\n{done.stderr or ''}")
        return (done.stdout or "").strip()


def find_engine(name: str | None, compose: str | None, repository: Path) -> Engine:
    """The engine asked for, or the one that is installed. Raises TrialFailed."""
    name = name or next((known for known in ("podman", "docker") if shutil.which(known)), None)
    if name is None:
        raise TrialFailed("neither podman nor docker is installed")
    if name == "docker":
        return Engine(name, ("docker", "compose"), repository)
    program = compose or shutil.which("podman-compose")
    if program is None:
        raise TrialFailed("podman-compose is not installed: pip install podman-compose")
    return Engine(name, (program,), repository)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _pip_mounts(folder: Path) -> list[str]:
    """Options that give pip in the build the configuration of pip here, with the local files that it names.

    They are mounted, not copied: nothing of them is in the image.
    """
    settings = _pip_settings()
    config = folder / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()), "utf-8")
    paths = {path for value in settings.values() for word in value.split() if (path := _local_path(word))}
    mounts = [f"{config}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(paths))]
    return [part for mount in mounts for part in ("--volume", mount)]


def _pip_settings() -> dict[str, str]:
    """Options by name, from pip's files and from the environment, which wins."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True).stdout
    settings: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        section, _, option = line.partition(".")
        name, _, value = option.partition("=")
        if section in (":env:", "global", "install"):
            settings[name] = value.strip("'\"").replace("\\n", " ")
    return settings


def _local_path(word: str) -> Path | None:
    """What must be mounted for a word of pip's configuration. An index on disk has its files beside its pages."""
    path = Path(urlsplit(word).path).parent if word.startswith("file://") else Path(word)
    return path if path.is_absolute() and path.exists() else None
