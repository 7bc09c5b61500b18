"""Builds the image, brings compose.yaml's mesh up in real containers, asks a question, and takes it all down again.

    python -m tests.compose.try_compose --model PATH_OF_GGUF

Not part of the tests: it needs podman with podman-compose, or docker with its compose plugin, and minutes to build.
Exits 0 if every container served its third of the layers, answered through the gateway and ended when asked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.compose.containers import SERVICES, Engine, TrialFailed, find_engine, free_port

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE = "meshnet-try"
MODEL_ID = "smollm2-135m"
LAYERS = {"tracker-node": (0, 10), "node-a": (10, 20), "node-b": (20, 30)}
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
# Torch is imported by three processes at once, perhaps on two cores.
READY_SECONDS = 300.0
HEALTHY_SECONDS = 60.0
ANSWER_SECONDS = 120.0
POLL_SECONDS = 0.5


def main() -> int:
    options = _options()
    try:
        engine = find_engine(options.engine, options.compose, REPOSITORY)
        if not options.no_build:
            seconds = engine.build(IMAGE, options.base)
            _say(f"image built in {seconds:.0f} s, {engine.image_size(IMAGE) / 1e9:.2f} GB")
        with _models_folder(options.model) as models:
            _try_mesh(engine, models)
    except TrialFailed as failure:
        _say(f"FAILED: {failure}")
        return 1
    _say("passed")
    return 0


def _try_mesh(engine: Engine, models: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    environment = {
        "MESHNET_IMAGE": IMAGE,
        "MESHNET_MODELS": str(models),
        "MESHNET_GATEWAY_PORT": url.rpartition(":")[2],
    }
    with engine.mesh(environment):
        started = time.monotonic()
        _check_closed(url)
        headers = {"Authorization": f"Bearer {engine.token()}"}
        _wait("the mesh serves every layer", lambda: _is_served(url, headers), READY_SECONDS)
        _say(f"every layer is served after {time.monotonic() - started:.0f} s")
        _check_layers(url, headers)
        _ask(url, headers)
        for service in SERVICES:
            _wait(f"{service} is healthy", partial(engine.is_healthy, service), HEALTHY_SECONDS)
        _say("every health check passes")
        for service, code in engine.stop().items():
            if code != 0:
                raise TrialFailed(f"{service} ended with code {code} when it was asked to stop")
        _say("every container ended in time with code 0")


def _check_closed(url: str) -> None:
    """Raises TrialFailed unless the gateway refuses who shows no token."""
    _wait("the gateway answers", lambda: _status(f"{url}/v1/models") is not None, READY_SECONDS)
    if (status := _status(f"{url}/v1/models")) != 401:
        raise TrialFailed(f"without a token the gateway answered {status}")
    _say("without a token the gateway answers 401")


def _status(url: str) -> int | None:
    """None if there is no answer yet."""
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code
    except httpx.HTTPError:
        return None


def _is_served(url: str, headers: dict[str, str]) -> bool:
    health = _get(f"{url}/health", headers)
    return health is not None and health["status"] == "ok" and MODEL_ID in health["models"]


def _check_layers(url: str, headers: dict[str, str]) -> None:
    """Raises TrialFailed unless each node holds its third and nothing else."""
    coverage = _get(f"{url}/v1/mesh/coverage", headers)
    if coverage is None:
        raise TrialFailed("the gateway does not tell the coverage map")
    held = {
        node["node_id"]: [(shard["start"], shard["end"]) for shard in node["shards"] if shard["state"] == "ready"]
        for node in coverage["nodes"]
    }
    _say(f"layers held: {held}")
    if held != {node_id: [layers] for node_id, layers in LAYERS.items()}:
        raise TrialFailed(f"each node must hold a third of the layers: {LAYERS}")


def _ask(url: str, headers: dict[str, str]) -> None:
    body = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
    }
    try:
        address = f"{url}/v1/chat/completions"
        answer = httpx.post(address, json=body, headers=headers, timeout=ANSWER_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        raise TrialFailed(f"the gateway did not answer the question: {error!r}") from error
    if answer.status_code != 200:
        raise TrialFailed(f"the gateway answered {answer.status_code}: {answer.text[:500]}")
    text = answer.json()["choices"][0]["message"]["content"]
    _say(f"{QUESTION} {text}")
    if ANSWER not in text:
        raise TrialFailed(f"the answer does not name {ANSWER}")


def _get(url: str, headers: dict[str, str]) -> dict[str, Any] | None:
    """The JSON object at an address; None if there is no answer yet."""
    try:
        answer = httpx.get(url, headers=headers, timeout=5.0, trust_env=False)
        body: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    return body if answer.status_code == 200 else None


def _wait(what: str, is_so: Callable[[], bool], seconds: float) -> None:
    """Raises TrialFailed if it is not so in time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TrialFailed(f"not so after {seconds:g} s: {what}")
        time.sleep(POLL_SECONDS)


@contextmanager
def _models_folder(model: Path) -> Iterator[Path]:
    """A folder with the weights under the name that gives the model its id, readable by the user of the image."""
    with tempfile.TemporaryDirectory(prefix="meshnet-models-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        copy = folder / f"{MODEL_ID}.gguf"
        shutil.copyfile(model, copy)
        copy.chmod(0o644)
        yield folder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct as a GGUF file")
    parser.add_argument("--engine", choices=("podman", "docker"), help="default: the one that is installed")
    parser.add_argument("--compose", help="path of podman-compose; default: the one in PATH")
    parser.add_argument(
        "--base", default=os.environ.get("MESHNET_BASE"), help="base image with Python 3.11, if not the Dockerfile's"
    )
    parser.add_argument("--no-build", action="store_true", help=f"take the image {IMAGE} as it is")
    return parser.parse_args()


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
