"""The OpenAPI document, and a running gateway held to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import schemathesis.openapi
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import BaseModel
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from services.gateway.api import answers
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.gateway.mesh_client import MeshClient
from services.gateway.openapi import OPERATIONS, Operation, document
from services.gateway.service import Service
from services.gateway.tokenizers_store import TokenizerStore
from tests.services.gateway.conftest import END
from tests.services.gateway.fake_mesh import FakeMesh, tokens
from tests.services.gateway.gateway_process import Gateway

HI = [{"role": "user", "content": "hi"}]


CHECKED = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture
def described(gateway: Gateway, mesh: FakeMesh) -> dict[str, Any]:
    """With a model that there is, and one that there is not: any other name would only be unknown too."""
    mesh.a.script = tokens(81, 82, END)
    described: dict[str, Any] = httpx.get(f"{gateway.url}/openapi.json").json()
    for schema in described["components"]["schemas"].values():
        if "model" in schema["properties"] and "object" not in schema["properties"]:
            schema["properties"]["model"] = {"enum": ["smol", "other"]}
    return described


@pytest.mark.parametrize(("path", "operation"), list(OPERATIONS.items()), ids=list(OPERATIONS))
def test_requests_as_described_are_answered_as_described(
    gateway: Gateway, described: dict[str, Any], path: str, operation: Operation
) -> None:
    loaded = schemathesis.openapi.from_dict(described)
    loaded.config.update(base_url=gateway.url)
    requests = loaded[path][operation.method].as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    seen: Counter[int] = Counter()

    @settings(max_examples=25, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=requests)
    def check(case: Any) -> None:
        response = case.call(timeout=30)
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKED)

    check()
    # Few completions are 200: what the document cannot say, such as that best_of is n, is refused.
    assert seen.total() > 0
    assert max(seen) < 500


def test_requests_that_are_nearly_as_described_are_answered_as_described(
    gateway: Gateway, described: dict[str, Any], tmp_path: Path
) -> None:
    """A thousand and more, each with one fault: among them the types, the bounds and the methods that are wrong."""
    document_path = tmp_path / "openapi.json"
    document_path.write_text(json.dumps(described))
    checks = ",".join([*(check.__name__ for check in CHECKED), "unsupported_method"])
    options = ["--url", gateway.url, "--checks", checks, "--phases", "coverage", "--no-color"]
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(document_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "Tested: 11" in done.stdout


def answers_of(gateway: Gateway) -> Iterator[tuple[str, type[BaseModel], httpx.Response]]:
    """One of each kind."""
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/completions": [{"prompt": "x"}, {"prompt": "x", "logprobs": 2, "echo": True, "n": 2}],
        "/v1/chat/completions": [{"messages": HI}, {"messages": HI, "logprobs": True, "top_logprobs": 2}],
        "/v1/responses": [{"input": "x"}, {"input": "x", "include": ["message.output_text.logprobs"]}],
        "/tokenize": [{"prompt": "x"}, {"messages": HI, "return_token_strs": True}],
        "/detokenize": [{"tokens": [5]}],
    }
    for path, operation in OPERATIONS.items():
        if operation.answer is None:
            continue
        url = gateway.url + path.replace("{model_id}", "smol")
        for body in bodies.get(path, [{}]):
            yield path, operation.answer, httpx.request(operation.method, url, json={"model": "smol", **body})


def test_answers_are_what_the_models_say(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(81, 82, END)
    paths = set()
    for path, answer, response in answers_of(gateway):
        assert response.status_code == 200, path
        answer.model_validate_json(response.content)
        paths.add(path)
    assert paths == {path for path, operation in OPERATIONS.items() if operation.answer}
    refused = httpx.post(f"{gateway.url}/v1/completions", json={})
    answers.Error.model_validate_json(refused.content)


async def test_every_route_is_described() -> None:
    config = GatewayConfig("127.0.0.1:1", "127.0.0.1", 0, {})
    app = create_app(Service(MeshClient(config.tracker, 1), TokenizerStore({})), config, 0)
    rules = {str(rule).replace("<path:model_id>", "{model_id}") for rule in app.url_map.iter_rules()}
    assert rules == set(document()["paths"])
