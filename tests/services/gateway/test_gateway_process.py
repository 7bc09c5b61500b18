"""The life of a gateway process: start, trackers that come and go, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from meshnet import addresses
from tests.processes import wait_until
from tests.services.gateway.fake_mesh import FakeMesh, model, shard, tokens, tokens_then_wait
from tests.services.gateway.gateway_process import running_gateway

STOP_SECONDS = 8


def status(url: str) -> int:
    return httpx.get(f"{url}/health").status_code


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.gateway", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_topology_everything_is_503_until_the_tracker_comes() -> None:
    with FakeMesh() as mesh:
        mesh.stop_tracker()
        with running_gateway("--tracker", mesh.address) as gateway:
            health = httpx.get(f"{gateway.url}/health")
            assert health.status_code == 503
            assert health.json()["error"]["code"] == "no_topology"
            assert int(health.headers["Retry-After"]) >= 1
            ask = {"model": "smol", "prompt": "x"}
            assert httpx.post(f"{gateway.url}/v1/completions", json=ask).status_code == 503
            mesh.tell(mesh.a.node(shard("smol")), smol=model("smol"))
            mesh.restart_tracker()
            wait_until(lambda: status(gateway.url) == 200)


def test_a_tracker_that_restarts_is_followed_again_and_answers_go_on(smollm2_gguf: Path) -> None:
    with FakeMesh() as mesh:
        mesh.tell(mesh.a.node(shard("smol")), smol=model("smol"))
        with running_gateway("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}") as gateway:
            wait_until(lambda: status(gateway.url) == 200)
            mesh.stop_tracker()
            wait_until(lambda: not httpx.get(f"{gateway.url}/health").json()["tracker_connected"])
            mesh.a.script = tokens(28)
            ask = {"model": "smol", "prompt": "x"}
            answer = httpx.post(f"{gateway.url}/v1/completions", json=ask, timeout=60)
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            mesh.tell(mesh.a.node(), smol=model("smol"))
            mesh.restart_tracker()
            wait_until(lambda: not httpx.get(f"{gateway.url}/health").json()["models"]["smol"]["complete"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_with_connections_and_streams_open(smollm2_gguf: Path, number: signal.Signals) -> None:
    with FakeMesh() as mesh:
        mesh.tell(mesh.a.node(shard("smol")), smol=model("smol"))
        mesh.a.script = tokens_then_wait(28)
        with running_gateway("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}") as gateway:
            wait_until(lambda: status(gateway.url) == 200)
            ask = {"model": "smol", "prompt": "x", "stream": True}
            with httpx.Client(timeout=60) as idle, httpx.Client(timeout=60) as busy:
                assert idle.get(f"{gateway.url}/v1/models").status_code == 200
                with busy.stream("POST", f"{gateway.url}/v1/completions", json=ask) as stream:
                    assert stream.status_code == 200
                    gateway.process.process.send_signal(number)
                    assert gateway.process.process.wait(STOP_SECONDS) == 0
            assert mesh.a.has_ended(mesh.a.requests[0].request_id, timeout=20)
            assert "Traceback" not in gateway.process.output()
            assert "left a generation" not in gateway.process.output()


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = addresses.join_address(*taken.getsockname()[:2])
        done = run("--listen", address)
    assert done.returncode == 1
    assert f"cannot listen on {address}: Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "m=/nowhere.gguf"), "does not exist"),
        (("--models", "/nowhere"), "does not exist"),
        (("--listen", "nonsense"), "HOST:PORT"),
        (("--tracker", "nonsense"), "HOST:PORT"),
        (("--log-level", "loud"), "log level"),
        (("--request-timeout", "0"), "0.1"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: tuple[str, ...], said: str) -> None:
    done = run("--listen", "127.0.0.1:0", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())


def test_damaged_tokenizer_files_cost_one_model_only(tmp_path: Path) -> None:
    damaged = tmp_path / "bad.gguf"
    damaged.write_bytes(b"GGUF nonsense")
    with FakeMesh() as mesh:
        mesh.tell(mesh.a.node(shard("bad")), bad=model("bad"))
        with running_gateway("--tracker", mesh.address, "--model", f"bad={damaged}") as gateway:
            wait_until(lambda: status(gateway.url) == 200)
            answer = httpx.post(f"{gateway.url}/v1/completions", json={"model": "bad", "prompt": "x"}, timeout=60)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "tokenizer_unavailable"
            assert status(gateway.url) == 200


def test_it_runs_without_torch(smollm2_gguf: Path) -> None:
    """Torch is made impossible to import, and what makes texts, prompts and the app runs."""
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
import services.gateway.process
from meshnet.model_files import ModelFiles
from services.gateway.tokenization import load_tokenizer
from services.gateway.tools.conversation import Conversation
tokenizer = load_tokenizer(ModelFiles("m", Path({str(smollm2_gguf)!r})))
prompt = tokenizer.render_chat(Conversation(({{"role": "user", "content": "hi"}},)))
ids = tokenizer.encode(prompt, special_tokens=False)
import json
print(json.dumps([tokenizer.decode(ids), [n for n in sys.modules if n.startswith("torch.")]]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    text, torch_modules = json.loads(done.stdout)
    assert "user\nhi" in text
    assert torch_modules == []
