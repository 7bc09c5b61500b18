"""The command-line tools that people use with a mesh, run for real."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx


def curl(url: str, headers: list[str], body: Path) -> tuple[int, bytes]:
    """Posts a file with the real curl, or in the same words with httpx where there is none."""
    if not shutil.which("curl"):
        sent = dict(header.split(": ", 1) for header in headers)
        answer = httpx.post(url, headers=sent, content=body.read_bytes(), timeout=30)
        return answer.status_code, answer.content
    command = ["curl", "-s", "-w", "%{stderr}%{http_code}", url, "--data-binary", f"@{body}"]
    options = [option for header in headers for option in ("-H", header)]
    outcome = subprocess.run([*command, *options], capture_output=True, timeout=30, check=True)
    return int(outcome.stderr), outcome.stdout


def grpcurl(address: str, *arguments: str, data: dict[str, Any] | None = None) -> str:
    """Runs the real grpcurl: `list`, `describe SYMBOL`, or a method to call with `data`."""
    outcome = _grpcurl(address, *arguments, data=data)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def grpcurl_refused(address: str, *arguments: str, data: dict[str, Any] | None = None) -> str:
    """What grpcurl says of a call that must fail."""
    outcome = _grpcurl(address, *arguments, data=data)
    assert outcome.returncode != 0, outcome.stdout
    return outcome.stderr


def _grpcurl(address: str, *arguments: str, data: dict[str, Any] | None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "grpcurl"), "-plaintext"]
    if data:
        command += ["-d", json.dumps(data)]
    return subprocess.run([*command, address, *arguments], capture_output=True, text=True, timeout=30, check=False)


def meshnet(*arguments: str) -> str:
    outcome = subprocess.run(
        [sys.executable, "-m", "meshnet.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout
