"""SmolLM2-135M whose layers live in three processes, against the unsharded model, and as its users reach it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from tests.e2e.commands import curl, grpcurl, meshnet
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.prompts import CHATS, prompt_ids
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "smollm2-135m"
GOLDEN = Path(__file__).parents[1] / "golden"
NEW_TOKENS = 64
# Ten layers each and no more: 7.08 MB a layer, 6.3 MB of KV cache a layer, the entry's 56.6 MB, and 36.1 MB for steps.
NODES = [
    NodeSpec("node-0", "230MB", tracker_node=True),
    NodeSpec("node-1", "175MB"),
    NodeSpec("node-2", "175MB"),
]


@pytest.fixture(scope="module")
def mesh(smollm2_gguf: Path) -> Iterator[Mesh]:
    with running_mesh([f"{MODEL}={smollm2_gguf}"], NODES, deploy=[MODEL], kv_tokens=8192, gateway=True) as running:
        yield running


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Reference:
    return Reference(smollm2_gguf)


@pytest.fixture(scope="module")
def prompts(smollm2_gguf: Path) -> list[list[int]]:
    return prompt_ids(AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name))


@pytest.fixture(autouse=True)
def _nothing_leaks(mesh: Mesh) -> Iterator[None]:
    yield
    mesh.wait_until_idle()


def test_each_node_holds_a_third(mesh: Mesh) -> None:
    assert mesh.layers(MODEL) == {"node-0": ["0-10"], "node-1": ["10-20"], "node-2": ["20-30"]}


def test_greedy_tokens_are_those_of_the_unsharded_model(
    mesh: Mesh, reference: Reference, prompts: list[list[int]]
) -> None:
    assert max(map(len, prompts)) > 1000
    flips = 0
    # Five at a time keep the pipeline busy, and each must get what it would get alone.
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda prompt: mesh.generate(MODEL, prompt, NEW_TOKENS), prompts))
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == NEW_TOKENS
        flips += reference.check(prompt, tokens).flips
    print(f"{len(prompts)} prompts, {flips} of {len(prompts) * NEW_TOKENS} tokens are near-ties of the reference")


def test_prompts_at_once_give_what_each_gives_alone(mesh: Mesh, reference: Reference, prompts: list[list[int]]) -> None:
    together = [prompts[0], prompts[7], prompts[4], prompts[8]]
    with ThreadPoolExecutor(len(together)) as pool:
        answers = list(pool.map(lambda prompt: mesh.generate(MODEL, prompt, 32), together))
    for prompt, tokens in zip(together, answers, strict=True):
        reference.check(prompt, tokens)


def test_a_seed_repeats_its_text(mesh: Mesh, prompts: list[list[int]]) -> None:
    def drawn(seed: int) -> list[int]:
        return mesh.generate(MODEL, prompts[0], 24, temperature=1.0, top_p=0.95, top_k=50, seed=seed)

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_the_openai_client_streams_a_chat(mesh: Mesh) -> None:
    client = openai.OpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    messages: Any = CHATS[0]
    options: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens > 3
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    completion = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=6, temperature=0)
    assert "5, 6" in completion.choices[0].text


def test_a_client_that_goes_away_stops_the_work_on_every_node(mesh: Mesh) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", f"{mesh.gateway_url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        wait_until(lambda: mesh.health("node-2")["sessions"] == 1, 10, "the last hop has the session")
    # The fixture waits until every node has freed it.


def test_of_many_clients_a_third_vanishes_and_no_answer_is_lost(mesh: Mesh) -> None:
    def client(index: int) -> str:
        draw = random.Random(index)
        prompt, leaves_after = "word " * draw.randint(1, 200), draw.randint(1, 6) if index % 3 == 0 else None
        body = {"model": MODEL, "prompt": prompt, "max_tokens": draw.randint(8, 24), "stream": True}
        with httpx.stream("POST", f"{mesh.gateway_url}/v1/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            events = (line for line in answer.iter_lines() if line.startswith("data: "))
            for count, event in enumerate(events):
                assert '"error"' not in event, event
                if event == "data: [DONE]":
                    return "whole"
                if count == leaves_after:
                    return "left"
        return "cut"

    with ThreadPoolExecutor(32) as pool:
        outcomes = Counter(pool.map(client, range(32)))
    assert outcomes == {"whole": 21, "left": 11}
    # The fixture waits until every node has freed all of it.


def test_an_over_long_prompt_is_refused_and_nothing_is_lost(mesh: Mesh) -> None:
    answer = httpx.post(
        f"{mesh.gateway_url}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 9000}, timeout=60
    )
    assert answer.status_code == 400
    assert "8192" in answer.json()["error"]["message"]


def test_the_published_headers_typed_with_curl_answer_with_a_tensor(mesh: Mesh, tmp_path: Path) -> None:
    frame = tmp_path / "frame.bin"
    frame.write_bytes(b"\x80\x3f" * 3 * 576)  # three positions of ones
    session = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
    url = f"http://{mesh.nodes['node-1'].match[1]}"
    headers = [
        "Content-Type: application/octet-stream",
        "X-Meshnet-Shape: 1,3,576",
        "X-Meshnet-Dtype: bfloat16",
        f"X-Meshnet-Session: {session}",
        "X-Meshnet-Chunk-Index: 0",
        "X-Meshnet-Chunk-Total: 1",
    ]
    status, tensor = curl(f"{url}/forward", headers, frame)
    assert status == 200
    assert len(tensor) == 3 * 576 * 2
    assert len({tensor[index : index + 2] for index in range(0, len(tensor), 2)}) > 100
    assert httpx.delete(f"{url}/sessions/{session}", timeout=30).status_code == 204


def test_malformed_golden_frames_get_their_4xx_and_the_node_lives_on(mesh: Mesh) -> None:
    url = f"http://{mesh.nodes['node-1'].match[1]}"
    cases = [case for case in json.loads((GOLDEN / "cases.json").read_text()) if "error" in case]
    assert len(cases) > 15
    for case in cases:
        body = (GOLDEN / case["body"]).read_bytes()
        answer = httpx.post(f"{url}/forward", headers=case["headers"], content=body, timeout=30)
        assert 400 <= answer.status_code < 500, case["name"]
        assert answer.json()["error"]["code"] == case["error"], case["name"]
    assert mesh.health("node-1")["status"] == "ok"


def test_grpcurl_shows_services_nodes_and_coverage(mesh: Mesh) -> None:
    tracker, entry = mesh.tracker_address, mesh.nodes["node-0"].match[2]
    assert {"meshnet.v1.Tracker", "meshnet.v1.Admin", "grpc.health.v1.Health"} <= set(grpcurl(tracker, "list").split())
    assert "rpc Generate" in grpcurl(entry, "describe", "meshnet.v1.Inference")
    nodes = json.loads(grpcurl(tracker, "meshnet.v1.Admin/ListNodes"))["nodes"]
    assert [node["node_id"] for node in nodes] == ["node-0", "node-1", "node-2"]
    (model,) = json.loads(grpcurl(tracker, "meshnet.v1.Admin/GetCoverage"))["models"]
    assert model["complete"] is True
    (route,) = json.loads(grpcurl(tracker, "meshnet.v1.Admin/ListRoutes"))["routes"]
    assert [hop["node_id"] for hop in route["hops"]] == ["node-0", "node-1", "node-2"]
    assert route["ready"] is True
    assert json.loads(grpcurl(entry, "grpc.health.v1.Health/Check"))["status"] == "SERVING"


def test_the_coverage_map_as_json_and_in_the_terminal(mesh: Mesh) -> None:
    coverage = httpx.get(f"{mesh.gateway_url}/v1/mesh/coverage", timeout=30).json()
    assert MODEL in json.dumps(coverage)
    picture = meshnet("status", "--tracker", mesh.tracker_address)
    assert "30 layers  complete" in picture
    assert "node-1" in picture
    assert "·" * 10 + "█" * 10 + "·" * 10 in picture
