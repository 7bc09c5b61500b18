"""The official openai client against a mesh of two nodes, and what it is told against transformers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.prompts import CHATS, TEXTS
from tests.oracle import log_probabilities
from tests.parity import Reference
from tests.processes import wait_until

MODEL = "smollm2-135m"
KV_TOKENS = 8192
# Seconds of work for each node.
LONG_PROMPT = 5000
# Fifteen layers each: 13.4 MB a layer with its KV cache, the entry's 56.6 MB, and 36.1 MB for steps.
NODES = [NodeSpec("node-0", "300MB", tracker_node=True), NodeSpec("node-1", "245MB")]
ALONE = [NodeSpec("node-0", "520MB", tracker_node=True)]
# How much further from the exact log-probabilities a mesh may be than transformers is at the same precision: over many
# tokens, and over a few dozen, whose roundings do not average out.
MANY_RATIO, FEW_RATIO = 1.25, 2.0
STORY = [{"role": "user", "content": "Tell me about a lighthouse keeper in two sentences."}]
DRAWN: dict[str, Any] = {"model": MODEL, "max_tokens": 48, "temperature": 1.0, "top_p": 0.95}


@pytest.fixture(scope="module")
def models(smollm2_gguf: Path) -> list[str]:
    return [f"{MODEL}={smollm2_gguf}"]


@pytest.fixture(scope="module")
def mesh(models: list[str]) -> Iterator[Mesh]:
    with running_mesh(models, NODES, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with client_of(mesh) as opened:
        yield opened


@pytest.fixture
async def async_client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def served(smollm2_gguf: Path) -> Reference:
    return Reference(smollm2_gguf)


@pytest.fixture(scope="module")
def exact(smollm2_gguf: Path) -> Reference:
    return Reference(smollm2_gguf, torch.float32)


@pytest.fixture(autouse=True)
def _nothing_leaks(mesh: Mesh) -> Iterator[None]:
    yield
    mesh.wait_until_idle()


def client_of(mesh: Mesh) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none", max_retries=0)


def test_each_node_holds_half(mesh: Mesh) -> None:
    assert mesh.layers(MODEL) == {"node-0": ["0-15"], "node-1": ["15-30"]}


def test_two_choices_of_a_seed_are_those_of_two_requests(client: openai.OpenAI) -> None:
    messages: Any = STORY
    both = client.chat.completions.create(**DRAWN, messages=messages, n=2, seed=11)
    texts = [choice.message.content for choice in both.choices]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert texts[0] != texts[1]
    for index, text in enumerate(texts):
        alone = client.chat.completions.create(**DRAWN, messages=messages, seed=11 + index)
        assert alone.choices[0].message.content == text
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**DRAWN, messages=messages, n=2, seed=11, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_logprobs_of_a_chat_are_those_of_transformers(
    client: openai.OpenAI, tokenizer: Any, served: Reference, exact: Reference
) -> None:
    messages: Any = STORY
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=32, temperature=0, logprobs=True, top_logprobs=5
    )
    assert answer.choices[0].logprobs
    content = answer.choices[0].logprobs.content
    assert content
    assert b"".join(bytes(token.bytes or ()) for token in content).decode() == answer.choices[0].message.content
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    emitted = [_token_id(tokenizer, bytes(token.bytes or ())) for token in content]
    told = torch.tensor([token.logprob for token in content])
    assert_near(told, following(exact, prompt, emitted), following(served, prompt, emitted), FEW_RATIO)
    for token in content:
        assert len(token.top_logprobs) == 5
        assert token.top_logprobs[0].token == token.token
        assert [top.logprob for top in token.top_logprobs] == sorted(t.logprob for t in token.top_logprobs)[::-1]


def test_echoed_prompts_have_the_log_probabilities_of_transformers(
    client: openai.OpenAI, tokenizer: Any, served: Reference, exact: Reference
) -> None:
    texts = list(TEXTS[:7])
    answer = client.completions.create(model=MODEL, prompt=texts, max_tokens=0, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == texts
    ours: list[float] = []
    right: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for text, choice in zip(texts, answer.choices, strict=True):
        ids: list[int] = tokenizer(text)["input_ids"]
        assert choice.logprobs
        assert choice.logprobs.token_logprobs
        assert choice.logprobs.token_logprobs[0] is None
        ours += [value for value in choice.logprobs.token_logprobs if value is not None]
        theirs.append(following(served, ids[:1], ids[1:]))
        right.append(following(exact, ids[:1], ids[1:]))
    assert len(ours) > 200
    assert_near(torch.tensor(ours), torch.cat(right), torch.cat(theirs), MANY_RATIO)


def test_logprobs_of_a_completion_hold_what_it_echoes_and_what_it_adds(
    client: openai.OpenAI, tokenizer: Any, served: Reference, exact: Reference
) -> None:
    prompt = "1, 2, 3, 4,"
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0, echo=True, logprobs=2)
    (choice,) = answer.choices
    assert "5, 6" in choice.text
    logprobs = choice.logprobs
    assert logprobs
    assert logprobs.tokens
    assert logprobs.token_logprobs
    assert logprobs.text_offset
    assert "".join(logprobs.tokens) == choice.text
    assert all(
        choice.text.startswith(token, at) for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True)
    )
    ids = [_token_id(tokenizer, token.encode()) for token in logprobs.tokens]
    told = torch.tensor([value for value in logprobs.token_logprobs if value is not None])
    assert_near(told, following(exact, ids[:1], ids[1:]), following(served, ids[:1], ids[1:]), FEW_RATIO)


def test_parameters_change_what_is_drawn(client: openai.OpenAI, tokenizer: Any) -> None:
    prompt = "one two one two one two one"

    def drawn_tokens(**more: Any) -> list[str]:
        own = {name: more.pop(name) for name in ("min_p", "top_k", "repetition_penalty", "ignore_eos") if name in more}
        options: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "logprobs": 0, "seed": 3, **more}
        (choice,) = client.completions.create(**options, extra_body={"ignore_eos": True, **own}).choices
        assert choice.logprobs is not None
        return list(choice.logprobs.tokens or ())

    greedy = drawn_tokens(temperature=0)
    assert len(greedy) == 24
    assert drawn_tokens(temperature=0, prompt=tokenizer(prompt)["input_ids"]) == greedy
    for narrowest in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1}):
        assert drawn_tokens(temperature=2.0, **narrowest) == greedy
    assert drawn_tokens(temperature=2.0) != greedy
    (two,) = tokenizer(" two")["input_ids"]
    assert drawn_tokens(temperature=1.0, logit_bias={str(two): 100}) == [" two"] * 24
    assert " two" in greedy
    assert " two" not in drawn_tokens(temperature=0, logit_bias={str(two): -100})
    assert drawn_tokens(temperature=0, stop=[" two"]) == greedy[: greedy.index(" two")]
    for penalty in ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"repetition_penalty": 3.0}):
        assert len(set(drawn_tokens(temperature=0, **penalty))) > len(set(greedy))


def test_an_answer_is_as_long_as_it_is_asked_to_be(client: openai.OpenAI) -> None:
    messages: Any = CHATS[0]

    def num_tokens(**more: Any) -> tuple[str, int]:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_completion_tokens=60, extra_body=more
        )
        assert answer.usage is not None
        return answer.choices[0].finish_reason, answer.usage.completion_tokens

    reason, count = num_tokens()
    assert reason == "stop"
    assert count < 40
    assert num_tokens(min_tokens=count + 5)[1] >= count + 5
    assert num_tokens(ignore_eos=True) == ("length", 60)


def test_the_responses_api_whole_and_streamed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": CHATS[0], "temperature": 0, "max_output_tokens": 32}
    whole = client.responses.create(**options)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    with client.responses.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == whole.output_text == final.output_text
    assert final.usage
    assert whole.usage
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_async_clients_stream_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def streamed(messages: Any) -> str:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=24, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def whole(messages: Any) -> str:
        answer = await async_client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=24, temperature=0
        )
        return answer.choices[0].message.content or ""

    texts = await asyncio.gather(*(streamed(messages) for messages in CHATS), *(whole(CHATS[0]) for _ in range(3)))
    assert "Paris" in texts[0]
    assert texts[len(CHATS) :] == [texts[0]] * 3


async def test_closing_or_cancelling_an_async_stream_stops_the_work(
    mesh: Mesh, async_client: openai.AsyncOpenAI
) -> None:
    aborted = aborted_choices(mesh)
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4000}
    ask["extra_body"] = {"ignore_eos": True}
    closed = await async_client.completions.create(**ask, stream=True)
    assert (await anext(closed)).choices
    await closed.close()

    begun = asyncio.Event()

    async def read() -> None:
        async for _ in await async_client.completions.create(**ask, stream=True):
            begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    unstreamed = asyncio.create_task(async_client.completions.create(**ask))
    await until(lambda: mesh.health("node-1")["sessions"] == 2, "both are generated")
    for task in (reading, unstreamed):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await until(lambda: aborted_choices(mesh) == aborted + 3, "the gateway has counted them as aborted")
    # The fixture waits until every node has freed them.


@pytest.mark.parametrize("leave", ["close", "half-close"])
def test_a_client_that_goes_during_prefill_stops_the_work_on_both_nodes(
    mesh: Mesh, client: openai.OpenAI, leave: str
) -> None:
    """Half a connection is none: the end of what a client sends is all that is heard of one that is gone."""
    aborted, url, worked = aborted_choices(mesh), httpx.URL(mesh.gateway_url), cpu_seconds(mesh)
    # Of one word, and no other test's: no part of it was computed before.
    prompt = [{"close": 400, "half-close": 500}[leave]] * LONG_PROMPT
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 500, "stream": True}).encode()
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: mesh.health("node-1")["sessions"] == 1, 30, "the last hop has some of it")
        if leave == "half-close":
            connection.shutdown(socket.SHUT_WR)
            # All of it: no answer has begun, and none will.
            assert connection.recv(65536) == b""
    mesh.wait_until_idle()
    wait_until(lambda: aborted_choices(mesh) == aborted + 1, 10, "the gateway has counted it as aborted")
    # Behind whatever a node might still be at.
    client.completions.create(model=MODEL, prompt="Hello", max_tokens=1)
    left = cpu_seconds(mesh)
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, timeout=120)
    for node_id, whole in cpu_seconds(mesh).items():
        spent, needed = left[node_id] - worked[node_id], whole - left[node_id]
        print(f"{leave}, {node_id}: {spent:.1f} of {needed:.1f} CPU seconds")
        assert spent < needed / 2


def test_a_seed_gives_the_same_text_alone_and_beside_others(client: openai.OpenAI) -> None:
    alone = [drawn(client, seed) for seed in range(4)]
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(8) as pool:
        # Seven others at a time, with prompts of their own.
        others = [pool.submit(drawn, client, 100 + index, TEXTS[index % len(TEXTS)]) for index in range(14)]
        beside = list(pool.map(lambda seed: drawn(client, seed), range(4)))
    assert all(other.result() for other in others)
    assert beside == alone


@pytest.mark.slow
def test_a_seed_gives_the_same_text_on_one_node(client: openai.OpenAI, models: list[str]) -> None:
    with (
        running_mesh(models, ALONE, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as whole,
        client_of(whole) as other,
    ):
        assert whole.layers(MODEL) == {"node-0": ["0-30"]}
        assert [drawn(other, seed) for seed in range(4)] == [drawn(client, seed) for seed in range(4)]
        whole.wait_until_idle()


def drawn(client: openai.OpenAI, seed: int, prompt: str = "Once upon a time there was") -> str:
    text: str = client.completions.create(**DRAWN, prompt=prompt, seed=seed).choices[0].text
    return text


def following(reference: Reference, prompt: list[int], targets: list[int]) -> torch.Tensor:
    """`[targets]`: log-probabilities of tokens that follow a prompt."""
    return log_probabilities(reference.logits([*prompt, *targets][:-1])[len(prompt) - 1 :], targets)


def assert_near(told: torch.Tensor, right: torch.Tensor, theirs: torch.Tensor, ratio: float) -> None:
    """What clients were `told` is about as far from what is `right` as what transformers says in bfloat16."""
    error, allowed = (float((values - right).square().mean().sqrt()) for values in (told, theirs))
    print(f"{len(told)} tokens: rms error {error:.4f}, of transformers {allowed:.4f}")
    assert error <= ratio * allowed


def cpu_seconds(mesh: Mesh) -> dict[str, float]:
    """What each node has worked, on all its threads."""
    times = {node_id: psutil.Process(node.process.pid).cpu_times() for node_id, node in mesh.nodes.items()}
    return {node_id: spent.user + spent.system for node_id, spent in times.items()}


def aborted_choices(mesh: Mesh) -> float:
    text = httpx.get(f"{mesh.gateway_url}/metrics", timeout=10).text
    counts = re.findall(r'^meshnet:request_success_total\{finished_reason="abort".*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, counts))


async def until(condition: Any, what: str) -> None:
    """As wait_until, while the event loop runs on."""
    await asyncio.to_thread(wait_until, condition, 20, what)


def _token_id(tokenizer: Any, token: bytes) -> int:
    (token_id,) = tokenizer(token.decode(), add_special_tokens=False)["input_ids"]
    return int(token_id)
