"""`meshnet up` as a person starts it: it answers, says how to go on, and Ctrl-C leaves nothing running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.tiny import save_tiny_llama
from tests.processes import wait_until

START_SECONDS = 180


def up(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "meshnet.cli", "up", *arguments),
            *("--gateway-listen", "127.0.0.1:0", "--tracker-listen", "127.0.0.1:0"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_answers_and_ends_without_a_trace(smollm2_gguf: Path, number: signal.Signals) -> None:
    mesh = up(
        *("--model", f"smollm2-135m={smollm2_gguf}", "--nodes", "2", "--vram", "400MB,250MB"),
        *("--kv-tokens", "4096", "--ask", "What is the capital of France? Answer in one sentence."),
    )
    try:
        said = _read_until(mesh, "Ctrl-C ends everything")
        children = psutil.Process(mesh.pid).children(recursive=True)
        assert len(children) == 4
        assert "30 layers  complete" in said
        assert "Paris" in said
        assert re.search(r"curl -N http://127.0.0.1:\d+/v1/chat/completions", said)
        mesh.send_signal(number)
        assert mesh.wait(30) == 0
    finally:
        mesh.kill()
        assert mesh.stdout
        mesh.stdout.close()
    assert not any(map(_runs, children))


def test_services_end_when_the_command_is_killed(tmp_path: Path) -> None:
    mesh = up("--model", str(save_tiny_llama(tmp_path / "tiny")), "--nodes", "2", "--stub", "--vram", "40MB")
    _read_until(mesh, "Ctrl-C ends everything")
    children = psutil.Process(mesh.pid).children(recursive=True)
    mesh.kill()
    mesh.wait()
    assert mesh.stdout
    mesh.stdout.close()
    wait_until(lambda: not any(map(_runs, children)), 30, "the services have ended")


def test_too_little_memory_is_said_with_what_to_do(tmp_path: Path) -> None:
    mesh = up("--model", str(save_tiny_llama(tmp_path / "tiny")), "--nodes", "2", "--stub", "--vram", "17MB")
    said, _ = mesh.communicate(timeout=START_SECONDS)
    assert mesh.returncode == 1
    assert "raise --vram or add --nodes" in said
    assert "layers" in said


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["up"], "name a model"),
        (["up", "--model", "/nowhere"], "does not exist"),
        (["up", "--model", "README.md"], "neither a directory"),
        (["status", "--tracker", "127.0.0.1:1"], "no tracker answers"),
        (["status", "--token-file", "/nowhere"], "`meshnet token /nowhere` makes one"),
        (["node", "--token-file", "/nowhere"], "`meshnet token /nowhere` makes one"),
        (["token", "/nowhere/token"], "cannot write"),
        (["describe", "n", "--tracker", "127.0.0.1:1"], "no tracker answers"),
        (["directives", "--tracker", "127.0.0.1:1"], "no tracker answers"),
        (["plan", "--tracker", "127.0.0.1:1"], "no tracker answers"),
        (["plan", "--sessions", "2"], "name the model"),
        (["plan", "--deploy", "m", "--context", "9999999999"], "cannot be asked this"),
        (["rebalance", "--tracker", "127.0.0.1:1"], "no tracker answers"),
        (["rebalance", "--json"], "add --yes"),
        (["events", "--tracker", "127.0.0.1:1"], "no tracker answers"),
        (["models", "inspect", "/nowhere"], "does not exist"),
        (["models", "inspect", "README.md"], "neither a directory"),
        (["chat", "--url", "http://127.0.0.1:1"], "no gateway answers"),
        (["node", "--vram", "much"], "is not a size"),
        (["node", "--quantization", "bfloat16,int3"], "is not a quantization"),
        (["up", "--quantization", "int3"], "is not a quantization"),
        (["node", "--listen", "nowhere"], "is not an address"),
        (["node", "--log-level", "loud"], "is not a log level"),
        (["tracker", "--log-level", "loud"], "is not a log level"),
        (["gateway", "--log-level", "loud"], "is not a log level"),
    ],
)
def test_mistakes_get_one_clear_line(arguments: list[str], hint: str) -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "meshnet.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert outcome.returncode != 0
    assert hint in outcome.stderr + outcome.stdout
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("up", "tracker-node", "node", "tracker", "gateway", "status", "chat", "deploy", "undeploy", "drain", "evict"),
        *("token", "describe", "directives", "plan", "rebalance", "events"),
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "meshnet.cli", command, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Usage: meshnet" in outcome.stdout


def _read_until(process: subprocess.Popen[str], mark: str) -> str:
    assert process.stdout
    said = ""
    for line in process.stdout:
        said += line
        if mark in line:
            return said
    raise AssertionError(f"ended before {mark!r}:\n{said}")


def _runs(process: psutil.Process) -> bool:
    """Not if it has ended and nobody has asked for its exit code yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
