"""The API of a running gateway, against a fake mesh. See also test_gateway_streams and test_gateway_process."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from meshnet.errors import Draining, KvFull, MeshnetError, NextHopFailed, NextHopTimeout
from meshnet.model_files import ModelFiles
from meshnet.topology import ShardState
from meshnet.v1 import inference_pb2
from services.gateway.limits import DEFAULT_KV_SHARE
from services.gateway.tokenization import ModelTokenizer, load_tokenizer
from tests.processes import wait_until
from tests.services.gateway.fake_mesh import (
    CONTEXT_LENGTH,
    KV_TOKENS,
    FakeMesh,
    draw,
    drawn,
    model,
    shard,
    tokens,
    tokens_then_fail,
)
from tests.services.gateway.gateway_process import Gateway, running_gateway

HI: list[Any] = [{"role": "user", "content": "hi"}]
END = 2
MODELS = {
    "smol": model("smol"),
    "bare": model("bare"),
    "gone": model("gone"),
    "half": model("half"),
    "strict": model("strict"),
}
STRICT_TEMPLATE = """{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}{{
raise_exception("Conversation roles must alternate") }}{% endif %}{{ m.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[FakeMesh]:
    with FakeMesh() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def strict(tokenizer: ModelTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a template that refuses two messages of one role."""
    directory = tmp_path_factory.mktemp("strict")
    own = tokenizer.tokenizer
    template, own.chat_template = own.chat_template, STRICT_TEMPLATE
    own.save_pretrained(directory)
    own.chat_template = template
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


@pytest.fixture(scope="module")
def gateway(mesh: FakeMesh, smollm2_gguf: Path, strict: Path) -> Iterator[Gateway]:
    told(mesh)
    models = itertools.chain.from_iterable(("--model", f"{name}={smollm2_gguf}") for name in ("smol", "gone", "half"))
    with running_gateway("--tracker", mesh.address, *models, "--model", f"strict={strict}") as gateway:
        wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
        yield gateway


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> ModelTokenizer:
    return load_tokenizer(ModelFiles("smol", smollm2_gguf))


@pytest.fixture(autouse=True)
def clean(mesh: FakeMesh, gateway: Gateway) -> None:
    told(mesh)
    for node in (mesh.a, mesh.b):
        node.requests.clear()
        node.script = tokens(END)


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def told(mesh: FakeMesh) -> None:
    """Node "a" is the only entry node; of "half" the last layers are missing, of "gone" all are."""
    whole = (
        shard("smol"),
        shard("bare"),
        shard("strict"),
        shard("half", 0, 20),
        shard("half", 20, 25, ShardState.LOADING),
    )
    mesh.tell(mesh.a.node(*whole), mesh.b.node(), **MODELS)


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json=body, timeout=30)


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["Content-Type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["bare", "gone", "half", "smol", "strict"]
    assert client.models.retrieve("smol").object == "model"


def test_chat_answers_with_text_reason_and_usage(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    ids = tokenizer.encode("Héllo wörld 🙂", special_tokens=False)
    mesh.a.script = tokens(*ids, END, cached=2)
    answer = client.chat.completions.create(model="smol", messages=HI, seed=7, temperature=0, max_completion_tokens=50)
    assert answer.choices[0].message.content == "Héllo wörld 🙂"
    assert answer.choices[0].finish_reason == "stop"
    (request,) = mesh.a.requests
    assert answer.id == f"chatcmpl-{request.request_id}"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt_token_ids)
    assert answer.usage.completion_tokens == len(ids) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert (request.sampling.seed, request.sampling.temperature, request.max_new_tokens) == (7, 0, 50)
    assert list(request.stop_token_ids) == [END]


def test_the_prompt_of_a_chat_is_the_template_once_with_no_second_bos(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    client.chat.completions.create(model="smol", messages=HI)
    (request,) = mesh.a.requests
    rendered = tokenizer.tokenizer.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert list(request.prompt_token_ids) == tokenizer.tokenizer.encode(rendered, add_special_tokens=False)
    assert list(request.prompt_token_ids)[:2].count(1) == 1
    assert request.max_new_tokens == KV_TOKENS * DEFAULT_KV_SHARE


def test_a_stream_is_the_unstreamed_text_and_ends_with_usage(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    mesh.a.script = tokens(*tokenizer.encode("Ünïcode 🙂🙃 text", special_tokens=False), END, cached=3)
    stream = client.chat.completions.create(
        model="smol",
        messages=HI,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Ünïcode 🙂🙃 text"
    assert all("\N{REPLACEMENT CHARACTER}" not in (delta.content or "") for delta in deltas)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
    assert {chunk.usage for chunk in chunks[:-1]} == {None}


def test_the_bytes_of_a_stream(gateway: Gateway, mesh: FakeMesh, tokenizer: ModelTokenizer) -> None:
    mesh.a.script = tokens(28, 29, END)
    response = post(gateway, "/v1/completions", model="smol", prompt="x", stream=True)
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["X-Request-Id"] == mesh.a.requests[0].request_id
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tokenizer.decode([28, 29])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {f"cmpl-{mesh.a.requests[0].request_id}"}


def test_completions_end_at_the_default_length(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(*[28] * 40)
    answer = client.completions.create(model="smol", prompt="hi")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [4, 5], [[4, 5]]])
def test_prompts_reach_the_mesh_as_token_ids(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer, prompt: Any
) -> None:
    client.completions.create(model="smol", prompt=prompt)
    expected = [4, 5] if prompt in ([4, 5], [[4, 5]]) else tokenizer.tokenizer("hi")["input_ids"]
    assert list(mesh.a.requests[0].prompt_token_ids) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["wor", "o w", ["zzz", " world"], "llo"])
def test_stop_strings_end_the_text_before_them(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer, stop: str | list[str], stream: bool
) -> None:
    text = "Hello world, hello again"
    mesh.a.script = tokens(*tokenizer.encode(text, special_tokens=False), finish=inference_pb2.FINISH_REASON_LENGTH)
    found = min(position for s in ([stop] if isinstance(stop, str) else stop) if (position := text.find(s)) >= 0)
    if stream:
        chunks = client.completions.create(model="smol", prompt="x", stop=stop, stream=True)
        choices = [chunk.choices[0] for chunk in chunks]
    else:
        choices = client.completions.create(model="smol", prompt="x", stop=stop).choices
    assert "".join(choice.text for choice in choices) == text[:found]
    assert choices[-1].finish_reason == "stop"
    assert mesh.a.has_ended(mesh.a.requests[0].request_id, timeout=20)


def test_sampling_parameters_reach_the_mesh(gateway: Gateway, mesh: FakeMesh) -> None:
    body = {"temperature": 0.5, "top_p": 0.25, "top_k": 9, "seed": -1, "ignore_eos": True}
    assert post(gateway, "/v1/completions", model="smol", prompt="x", **body).status_code == 200
    (request,) = mesh.a.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 9, 2**64 - 1)
    assert list(request.stop_token_ids) == []
    post(gateway, "/v1/completions", model="smol", prompt="x", seed=None)
    assert not mesh.a.requests[1].sampling.HasField("seed")
    assert mesh.a.requests[1].sampling.temperature == 1


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": ""}, "prompt", None),
        ({"prompt": []}, "prompt", None),
        ({"prompt": [49152]}, "prompt", "invalid_value"),
        ({"prompt": [[4], []]}, "prompt[1]", None),
        ({"prompt": [[4], [49152]]}, "prompt[1]", "invalid_value"),
        ({"prompt": ["x", "word " * 10_000]}, "prompt[1]", "context_length_exceeded"),
        ({"prompt": "x", "logit_bias": {"49152": 1}}, "logit_bias", "invalid_value"),
        ({"prompt": "x", "stop_token_ids": [49152]}, "stop_token_ids", "invalid_value"),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens", "invalid_value"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
        ({"prompt": "x", "max_tokens": 8192}, "prompt", "context_length_exceeded"),
        ({"prompt": [5] * 9000}, "prompt", "context_length_exceeded"),
        ({"prompt": "word " * 10_000}, "prompt", "context_length_exceeded"),
        ({"prompt": "word " * 1_000_000}, "prompt", "context_length_exceeded"),
    ],
)
def test_bad_completions_are_refused_before_the_mesh_is_asked(
    gateway: Gateway, mesh: FakeMesh, body: dict[str, Any], param: str, code: str | None
) -> None:
    response = post(gateway, "/v1/completions", model="smol", **body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    if code == "context_length_exceeded":
        assert str(CONTEXT_LENGTH) in error["message"]
        assert "new tokens after a prompt of" in error["message"]
    assert mesh.a.requests == []


def test_the_limit_is_what_the_model_is_deployed_with(gateway: Gateway, mesh: FakeMesh) -> None:
    limit = 40
    url = f"{gateway.url}/v1/models/smol"
    limited = MODELS | {"smol": replace(MODELS["smol"], max_context=limit)}
    mesh.tell(mesh.a.node(shard("smol")), mesh.b.node(), **limited)
    try:
        wait_until(lambda: httpx.get(url).json()["context_length"] == limit)
        coverage = httpx.get(f"{gateway.url}/v1/mesh/coverage").json()["models"]["smol"]
        assert coverage["context_length"] == limit
        for path, body in (
            ("/v1/completions", {"prompt": [5] * limit, "max_tokens": 1}),
            ("/v1/completions", {"prompt": "word " * 1000}),
            ("/v1/completions", {"prompt": [5], "max_tokens": limit}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40}]}),
        ):
            response = post(gateway, path, model="smol", **body)
            assert response.status_code == 400
            assert error_of(response)["code"] == "context_length_exceeded"
            assert f"maximum context length is {limit} tokens" in error_of(response)["message"]
        assert mesh.a.requests == []
        assert post(gateway, "/v1/completions", model="smol", prompt=[5] * (limit - 1), max_tokens=1).is_success
    finally:
        told(mesh)
        wait_until(lambda: httpx.get(url).json()["context_length"] == CONTEXT_LENGTH)


def test_what_a_chat_template_objects_to_is_a_400(gateway: Gateway, mesh: FakeMesh) -> None:
    twice = post(gateway, "/v1/chat/completions", model="strict", messages=HI * 2)
    assert twice.status_code == 400
    assert "roles must alternate" in error_of(twice)["message"]
    assert post(gateway, "/v1/chat/completions", model="strict", messages=HI).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"model":' * 50_000, b'"text"'], ids=["empty", "cut", "utf8", "deep", "text"]
)
def test_a_body_that_is_no_json_object_is_a_400(gateway: Gateway, body: bytes) -> None:
    response = httpx.post(f"{gateway.url}/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_json"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"])
def test_a_body_that_says_it_is_something_else_is_a_415(gateway: Gateway, path: str, kind: str) -> None:
    response = httpx.post(f"{gateway.url}{path}", content=b"{}", headers={"Content-Type": kind})
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"
    assert "application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    "kind", [None, "application/json", "application/json; charset=utf-8", "application/vnd.x+json"]
)
def test_a_body_that_says_it_is_json_or_nothing_is_read(gateway: Gateway, kind: str | None) -> None:
    body = json.dumps({"model": "smol", "prompt": "x"}).encode()
    headers = {} if kind is None else {"Content-Type": kind}
    assert httpx.post(f"{gateway.url}/v1/completions", content=body, headers=headers).status_code == 200


def test_an_unknown_model_is_told_the_known_ones(gateway: Gateway) -> None:
    for response in (
        post(gateway, "/v1/completions", model="other", prompt="x"),
        httpx.get(f"{gateway.url}/v1/models/a/b"),
    ):
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "model_not_found"
        assert "smol" in error["message"]


def test_a_model_without_tokenizer_files_says_how_to_give_them(gateway: Gateway) -> None:
    response = post(gateway, "/v1/completions", model="bare", prompt="x")
    assert response.status_code == 503
    assert "--model bare=PATH" in error_of(response)["message"]


@pytest.mark.parametrize(("model_id", "missing"), [("gone", "0-30"), ("half", "20-30")])
def test_missing_layers_are_a_503_at_once(gateway: Gateway, model_id: str, missing: str) -> None:
    response = post(gateway, "/v1/chat/completions", model=model_id, messages=HI)
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) >= 1
    error = error_of(response)
    assert error["code"] == "missing_layers"
    assert missing in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code", "retry_after"),
    [
        (KvFull("the KV cache is full", retry_after=3), 429, "kv_full", "3"),
        (Draining("leaving"), 503, "draining", "1"),
        (NextHopFailed("hop b failed", "b"), 502, "next_hop_failed", None),
        (NextHopTimeout("hop b is slow", "b"), 504, "next_hop_timeout", None),
        (MeshnetError("a fault"), 500, "internal", None),
    ],
)
def test_failures_of_the_mesh_keep_their_status(
    gateway: Gateway,
    mesh: FakeMesh,
    failure: MeshnetError,
    status: int,
    code: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    mesh.a.script = tokens_then_fail(failure)
    response = post(gateway, "/v1/completions", model="smol", prompt="x", stream=stream)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert response.headers.get("Retry-After") == retry_after


def test_a_failure_in_mid_stream_is_an_event_and_then_the_end(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_fail(NextHopFailed("hop b failed", "b"), 28, 29)
    response = post(gateway, "/v1/chat/completions", model="smol", messages=HI, stream=True)
    assert response.status_code == 200
    *_, last, end = response.text.split("\n\n")
    assert end == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "next_hop_failed"
    assert "[DONE]" not in response.text


def test_a_lost_entry_node_is_replaced_by_another_that_goes_on(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.tell(mesh.a.node(shard("smol")), mesh.b.node(shard("smol"), num_sessions=5), **MODELS)
    wait_until(lambda: httpx.get(f"{gateway.url}/v1/mesh/coverage").json()["nodes"][1]["num_sessions"] == 5)
    mesh.a.script = tokens_then_fail(Draining("leaving"), 28, 29)
    mesh.b.script = tokens(30, END)
    answer = post(gateway, "/v1/completions", model="smol", prompt=[7], max_tokens=9)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    (first,), (second,) = mesh.a.requests, mesh.b.requests
    assert list(second.prompt_token_ids) == [7, 28, 29]
    assert second.max_new_tokens == 7
    assert second.request_id != first.request_id


def test_the_draws_of_a_seed_go_on_at_another_entry_node(
    gateway: Gateway, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    mesh.tell(mesh.a.node(shard("smol")), mesh.b.node(shard("smol"), num_sessions=6), **MODELS)
    wait_until(lambda: httpx.get(f"{gateway.url}/v1/mesh/coverage").json()["nodes"][1]["num_sessions"] == 6)
    mesh.a.script, mesh.b.script = drawn(3, Draining("leaving")), drawn()
    body = {"prompt": [7], "seed": 11, "max_tokens": 8, "min_tokens": 5, "presence_penalty": 1, "logprobs": 0}
    answer = post(gateway, "/v1/completions", model="smol", echo=True, **body).json()
    assert answer["choices"][0]["text"].endswith(tokenizer.decode([draw(11, index) for index in range(8)]))
    # The first token of the prompt, and eight new ones: the prompt's logprobs came once.
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 9
    (first,), (second,) = mesh.a.requests, mesh.b.requests
    assert (first.num_generated, second.num_generated) == (0, 3)
    assert (second.max_new_tokens, second.sampling.min_new_tokens) == (5, 5)
    assert (first.prompt_logprobs, second.prompt_logprobs) == (True, False)
    assert second.sampling.presence_penalty == 1


def test_a_request_waits_for_the_first_ready_route(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.tell(mesh.a.node(shard("smol"), probed=False), **MODELS)
    wait_until(lambda: not httpx.get(f"{gateway.url}/health").json()["models"]["smol"]["ready"])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, gateway, "/v1/completions", model="smol", prompt="x")
        told(mesh)
        assert waiting.result(30).status_code == 200


def test_without_a_ready_route_requests_are_refused_with_the_failure(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.tell(mesh.a.node(shard("smol"), failure="node c gave no answer"), **MODELS)
    wait_until(lambda: not httpx.get(f"{gateway.url}/health").json()["models"]["smol"]["ready"])
    health = httpx.get(f"{gateway.url}/health").json()
    assert health["models"]["smol"]["complete"]
    assert health["models"]["smol"]["failure"] == "entry node a: node c gave no answer"
    response = post(gateway, "/v1/completions", model="smol", prompt="x")
    assert response.status_code == 503
    assert error_of(response)["code"] == "route_not_ready"
    assert "node c gave no answer" in error_of(response)["message"]
    assert response.headers["Retry-After"] == "2"
    assert mesh.a.requests == []
    told(mesh)
    wait_until(lambda: httpx.get(f"{gateway.url}/health").json()["models"]["smol"]["ready"])


def test_coverage_and_health_are_json(gateway: Gateway, mesh: FakeMesh) -> None:
    health = httpx.get(f"{gateway.url}/health")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    smol = {"complete": True, "missing_layers": [], "ready": True, "failure": ""}
    assert health.json()["models"]["smol"] == smol
    assert health.json()["models"]["half"]["missing_layers"] == ["20-30"]
    coverage = httpx.get(f"{gateway.url}/v1/mesh/coverage").json()
    half = coverage["models"]["half"]
    assert half["missing"] == [{"start": 20, "end": 30}]
    assert half["spans"][1] == {"start": 20, "end": 25, "ready": [], "loading": ["a"]}
    assert coverage["nodes"][0]["grpc_address"] == mesh.a.address


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/health", 405), ("POST", "/%ff", 404)],
)
def test_errors_of_http_are_json_too(gateway: Gateway, method: str, path: str, status: int) -> None:
    response = httpx.request(method, f"{gateway.url}{path}")
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert uuid.UUID(response.headers["X-Request-Id"])
    assert ("Allow" in response.headers) == (status == 405)


def test_a_body_over_the_limit_is_a_413_that_arrives(gateway: Gateway) -> None:
    response = httpx.post(f"{gateway.url}/v1/completions", content=b"x" * (17 * 1024 * 1024), timeout=30)
    assert response.status_code == 413
    assert error_of(response)["message"]


def test_a_body_over_the_limit_of_unknown_length_is_a_413_that_arrives(gateway: Gateway) -> None:
    body = (b"x" * 65536 for _ in range(300))
    response = httpx.post(f"{gateway.url}/v1/completions", content=body, timeout=30)
    assert response.status_code == 413
    assert error_of(response)["message"]
