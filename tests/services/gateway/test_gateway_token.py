"""A gateway with a token: what its clients need, and that it shows the token to the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from meshnet.security.token_file import replace_file
from meshnet.security.tokens import make_token
from services.gateway.openapi import OPERATIONS
from tests.processes import wait_until
from tests.services.gateway.fake_mesh import FakeMesh, model, shard, tokens
from tests.services.gateway.gateway_process import Gateway, running_gateway

END = 2
TOKEN, NEW, OTHER = make_token(), make_token(), make_token()
WRONG = {
    "none": None,
    "empty": "",
    "no token": "Bearer",
    "other": f"Bearer {OTHER}",
    "other scheme": f"Basic {TOKEN}",
    "no scheme": TOKEN,
    "a part": f"Bearer {TOKEN[:-1]}",
}
COMPLETION = {"model": "smol", "prompt": "x"}


@dataclass(frozen=True)
class Guarded:
    gateway: Gateway
    mesh: FakeMesh
    path: Path

    def ask(self, method: str, path: str, shown: str | None, **more: object) -> httpx.Response:
        headers = {} if shown is None else {"Authorization": shown}
        return httpx.request(method, self.gateway.url + path, headers=headers, timeout=30, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def guarded(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    path = tmp_path_factory.mktemp("secret") / "token"
    replace_file(path, [TOKEN])
    with FakeMesh() as mesh:
        mesh.tell(mesh.a.node(shard("smol")), smol=model("smol"))
        mesh.a.script = tokens(81, 82, END)
        arguments = ("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}", "--token-file", str(path))
        with running_gateway(*arguments) as gateway:
            wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
            yield Guarded(gateway, mesh, path)


@pytest.mark.parametrize("shown", WRONG.values(), ids=list(WRONG))
def test_every_path_is_closed_to_who_does_not_show_it(guarded: Guarded, shown: str | None) -> None:
    paths = [(operation.method, path) for path, operation in OPERATIONS.items() if path != "/health"]
    assert len(paths) == 10
    for method, path in [*paths, ("GET", "/nothing"), ("POST", "/health"), ("GET", "/health/")]:
        answer = guarded.ask(method, path.replace("{model_id}", "smol"), shown, json=COMPLETION)
        assert answer.status_code == 401, (method, path)
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert "api_key" in error["message"]
        assert TOKEN not in answer.text
    assert not guarded.mesh.a.requests


def test_whether_it_lives_is_for_all_and_what_it_serves_is_not(guarded: Guarded) -> None:
    for shown in WRONG.values():
        answer = guarded.ask("GET", "/health", shown)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "tracker_connected": True, "models": {}})
    assert list(guarded.ask("GET", "/health", f"Bearer {TOKEN}").json()["models"]) == ["smol"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_api_key_of_openai_clients_is_the_token(guarded: Guarded, stream: bool) -> None:
    options = {"base_url": f"{guarded.gateway.url}/v1", "max_retries": 0, "timeout": 30}
    with openai.OpenAI(**options, api_key=TOKEN) as client:  # type: ignore[arg-type]
        assert [model.id for model in client.models.list()] == ["smol"]
        answer = client.completions.create(**COMPLETION, stream=stream)  # type: ignore[call-overload]
        texts = [part.choices[0].text for part in answer] if stream else [answer.choices[0].text]
        assert "".join(texts) == "ab"
    with openai.OpenAI(**options, api_key=OTHER) as client, pytest.raises(openai.AuthenticationError):  # type: ignore[arg-type]
        client.completions.create(**COMPLETION, stream=stream)  # type: ignore[call-overload]
    guarded.mesh.a.requests.clear()


def test_a_body_of_a_stranger_is_not_waited_for(guarded: Guarded) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield bytes(1 << 16)

    try:
        answer = guarded.ask("POST", "/v1/completions", None, content=endless())
    except httpx.TransportError:
        return
    assert answer.status_code == 401


def test_a_rotation_is_noticed(guarded: Guarded) -> None:
    try:
        for accepted, shown in (([TOKEN, NEW], NEW), ([NEW, TOKEN], TOKEN), ([NEW], NEW)):
            replace_file(guarded.path, accepted)
            assert guarded.ask("GET", "/v1/models", f"Bearer {shown}").status_code == 200
        wait_until(lambda: guarded.ask("GET", "/v1/models", f"Bearer {TOKEN}").status_code == 401)
    finally:
        replace_file(guarded.path, [TOKEN])
    wait_until(lambda: guarded.ask("GET", "/v1/models", f"Bearer {TOKEN}").status_code == 200)


def test_no_token_is_in_what_it_says(guarded: Guarded) -> None:
    guarded.ask("POST", "/v1/completions", f"Bearer {OTHER}", json=COMPLETION)
    metrics = guarded.ask("GET", "/metrics", f"Bearer {TOKEN}").text
    assert "401" in metrics
    for token in (TOKEN, NEW, OTHER):
        assert token not in guarded.gateway.process.output()
        assert token not in metrics


def test_the_mesh_is_shown_it(guarded: Guarded) -> None:
    assert guarded.mesh.shown
    assert guarded.mesh.shown <= {f"Bearer {TOKEN}", f"Bearer {NEW}"}
    assert guarded.ask("POST", "/v1/completions", f"Bearer {TOKEN}", json=COMPLETION).status_code == 200
    assert guarded.mesh.a.shown[-1] == f"Bearer {TOKEN}"
    guarded.mesh.a.requests.clear()
