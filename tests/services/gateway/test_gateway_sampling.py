"""Parameters of sampling, several choices and prompts, and logprobs: through a running gateway."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import openai
import pytest

from meshnet.errors import KvFull, NextHopFailed
from meshnet.v1 import inference_pb2
from services.gateway.tokenization import ModelTokenizer
from tests.processes import wait_until
from tests.services.gateway.conftest import END
from tests.services.gateway.fake_mesh import (
    FakeMesh,
    Script,
    by_request,
    draw,
    drawn,
    tokens,
    tokens_then_fail,
    tokens_then_wait,
)
from tests.services.gateway.gateway_process import Gateway

HI: list[Any] = [{"role": "user", "content": "hi"}]
LENGTH = inference_pb2.FINISH_REASON_LENGTH


def post(gateway: Gateway, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json={"model": "smol", **body}, timeout=30)


def completed(gateway: Gateway, **body: Any) -> dict[str, Any]:
    response = post(gateway, **body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(gateway: Gateway, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    response = post(gateway, path, stream=True, **body)
    assert response.status_code == 200, response.text
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


def seeds_of(mesh: FakeMesh) -> list[int]:
    return sorted(request.sampling.seed for request in mesh.a.requests)


def word(seed: int, tokenizer: ModelTokenizer, num_tokens: int = 4) -> str:
    return tokenizer.decode([draw(seed, index) for index in range(num_tokens)])


def test_all_parameters_of_sampling_reach_the_mesh(gateway: Gateway, mesh: FakeMesh) -> None:
    body = {
        "min_p": 0.25,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "49151": 2.5},
        "min_tokens": 3,
        "stop_token_ids": [7],
    }
    completed(gateway, prompt="x", **body)
    assert post(gateway, "/v1/chat/completions", messages=HI, **body).status_code == 200
    for request in mesh.a.requests:
        sampling = request.sampling
        assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -1.5, 0.5)
        assert (sampling.repetition_penalty, sampling.min_new_tokens) == (1.25, 3)
        assert dict(sampling.logit_bias) == {5: -100.0, 49151: 2.5}
        assert list(request.stop_token_ids) == [END, 7]
        assert not request.HasField("top_logprobs")
        assert not request.prompt_logprobs


def test_what_is_not_asked_for_is_neutral(gateway: Gateway, mesh: FakeMesh) -> None:
    completed(gateway, prompt="x")
    (request,) = mesh.a.requests
    sampling = request.sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty, sampling.min_new_tokens) == (0,) * 4
    assert sampling.repetition_penalty == 1
    assert dict(sampling.logit_bias) == {}
    assert request.num_generated == 0


@pytest.mark.parametrize("prompt", [["a b", "c"], [[4, 5], [6]]])
def test_choices_of_all_prompts_in_order_each_with_its_seed(
    gateway: Gateway, mesh: FakeMesh, tokenizer: ModelTokenizer, prompt: list[Any]
) -> None:
    mesh.a.script = drawn()
    answer = completed(gateway, prompt=prompt, n=2, best_of=2, seed=40, max_tokens=4)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [word(40 + index, tokenizer) for index in range(4)]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    by_seed = {request.sampling.seed: request for request in mesh.a.requests}
    encoded = [p if isinstance(p, list) else tokenizer.encode(p, special_tokens=True) for p in prompt]
    assert [list(by_seed[seed].prompt_token_ids) for seed in (40, 41, 42, 43)] == [
        encoded[0],
        encoded[0],
        encoded[1],
        encoded[1],
    ]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, encoded))
    assert answer["usage"]["completion_tokens"] == 16
    assert len({request.request_id for request in mesh.a.requests}) == 4


def test_seeds_go_around_at_their_end(gateway: Gateway, mesh: FakeMesh) -> None:
    completed(gateway, prompt="x", n=2, seed=-1)
    assert seeds_of(mesh) == [0, 2**64 - 1]


def test_choices_without_a_seed_have_none(gateway: Gateway, mesh: FakeMesh) -> None:
    completed(gateway, prompt="x", n=3)
    assert [request.sampling.HasField("seed") for request in mesh.a.requests] == [False] * 3


def test_chats_have_choices_too(client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer) -> None:
    mesh.a.script = drawn()
    answer = client.chat.completions.create(model="smol", messages=HI, n=3, seed=5, max_completion_tokens=4)
    assert [choice.message.content for choice in answer.choices] == [word(5 + i, tokenizer) for i in range(3)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(mesh.a.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_of_choices_interleave_and_each_ends_once(
    gateway: Gateway, mesh: FakeMesh, tokenizer: ModelTokenizer, path: str
) -> None:
    mesh.a.script = drawn()
    body = {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": HI}
    num_prompts = len(body.get("prompt", "x"))
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = streamed(gateway, path, **body, **usage, n=3, seed=8, max_tokens=4)
    texts: dict[int, str] = defaultdict(str)
    reasons = defaultdict(list)
    for chunk in chunks:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice["finish_reason"] is not None:
            reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == {index: word(8 + index, tokenizer) for index in range(3 * num_prompts)}
    assert reasons == {index: ["length"] for index in range(3 * num_prompts)}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12 * num_prompts


def one_fails(error: Exception, other: Script) -> Script:
    """The choice with seed 1 fails; the others run on."""

    def choose(request: inference_pb2.GenerateRequest) -> Script:
        return tokens_then_fail(error, 81) if request.sampling.seed == 1 else other  # type: ignore[arg-type]

    return by_request(choose)


@pytest.mark.parametrize(
    ("error", "status"), [(NextHopFailed("hop b failed", "b"), 502), (KvFull("the KV cache is full"), 429)]
)
def test_if_one_choice_fails_the_others_end_and_the_request_fails(
    gateway: Gateway, mesh: FakeMesh, error: Exception, status: int
) -> None:
    mesh.a.script = one_fails(error, tokens_then_wait(81))
    assert post(gateway, prompt="x", n=3, seed=0).status_code == status
    # It may fail before the last of the others has got here.
    assert 1 in {request.sampling.seed for request in mesh.a.requests}
    assert all(mesh.a.has_ended(request.request_id, timeout=20) for request in mesh.a.requests)


def test_if_one_choice_of_a_stream_fails_it_ends_with_the_error(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = one_fails(NextHopFailed("hop b failed", "b"), tokens_then_wait(81))
    response = post(gateway, prompt="x", n=3, seed=0, stream=True)
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    assert json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "next_hop_failed"
    assert all(mesh.a.has_ended(request.request_id, timeout=20) for request in mesh.a.requests)


def test_a_client_that_goes_ends_all_choices(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_wait(81)
    body = {"model": "smol", "prompt": "x", "n": 4, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=30) as response:
        events = response.iter_raw()
        next(events)
        wait_until(lambda: len(mesh.a.requests) == 4)
    assert all(mesh.a.has_ended(request.request_id, timeout=20) for request in mesh.a.requests)


def test_logprobs_of_a_chat(client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer) -> None:
    mesh.a.script = tokens(81, 82, END)
    answer = client.chat.completions.create(model="smol", messages=HI, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(t.token, t.logprob, bytes(t.bytes or ())) for t in logprobs.content] == [
        ("a", -1.25, b"a"),
        ("b", -0.25, b"b"),
    ]
    names = [[tokenizer.decode([80 + i]), tokenizer.decode([81 + i])] for i in (0, 2)]
    assert [[top.token for top in t.top_logprobs] for t in logprobs.content] == names
    assert [[top.logprob for top in t.top_logprobs] for t in logprobs.content] == [[-0.25, -1.25]] * 2
    assert mesh.a.requests[0].top_logprobs == 2


def test_logprobs_of_a_chat_without_the_likeliest(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(81)
    answer = client.chat.completions.create(model="smol", messages=HI, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [t.top_logprobs for t in answer.choices[0].logprobs.content] == [[]]
    assert mesh.a.requests[0].HasField("top_logprobs")


def test_parts_of_a_character_are_shown_as_bytes(
    client: openai.OpenAI, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    text = "a🦜b"
    ids = tokenizer.encode(text, special_tokens=False)
    mesh.a.script = tokens(*ids, END)
    answer = client.chat.completions.create(model="smol", messages=HI, logprobs=True)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert len(content) == len(ids) > 4
    assert b"".join(bytes(token.bytes or ()) for token in content) == text.encode()
    parts = [token for token in content if token.token.startswith("bytes:")]
    assert parts
    assert parts[0].token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in parts[0].bytes or ())


def test_logprobs_of_a_completion_and_its_echo(client: openai.OpenAI, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(83, END, cached=1)
    answer = client.completions.create(model="smol", prompt="ab é", echo=True, logprobs=1, max_tokens=5)
    (choice,) = answer.choices
    (request,) = mesh.a.requests
    num_prompt = len(request.prompt_token_ids)
    assert (request.top_logprobs, request.prompt_logprobs, request.max_new_tokens) == (1, True, 5)
    assert choice.text == "ab éc"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    assert "".join(choice.logprobs.tokens) == "ab éc<|im_end|>"
    assert choice.logprobs.text_offset[num_prompt:] == [4, 5]
    assert choice.logprobs.text_offset[:num_prompt] == [0, 2]
    lengths = {len(values) for values in (choice.logprobs.tokens, choice.logprobs.token_logprobs)}
    assert lengths == {num_prompt + 2}
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert all(logprob is not None for logprob in choice.logprobs.token_logprobs[1:])
    # The likeliest, and the token itself where that is another one.
    assert {len(top) for top in choice.logprobs.top_logprobs[1:]} <= {1, 2}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_echo_without_logprobs_is_the_prompt_before_the_text(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(81)
    answer = completed(gateway, prompt=["<|im_start|>x", "y"], echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["<|im_start|>xa"] * 2 + ["ya"] * 2
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}
    assert not mesh.a.requests[0].prompt_logprobs


def test_nothing_generated_and_no_logprobs_needs_no_mesh(gateway: Gateway, mesh: FakeMesh) -> None:
    answer = completed(gateway, prompt=[81, 82], echo=True, max_tokens=0)
    assert answer["choices"][0] == {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": None}
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 2
    chunks = streamed(gateway, prompt="ab", echo=True, max_tokens=0)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", ""]
    assert mesh.a.requests == []


def test_nothing_generated_with_logprobs_scores_the_prompt(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(finish=LENGTH)
    answer = completed(gateway, prompt=[81, 82, 83], echo=True, logprobs=0, max_tokens=0)
    (request,) = mesh.a.requests
    assert (request.max_new_tokens, request.prompt_logprobs, request.top_logprobs) == (0, True, 0)
    assert request.HasField("top_logprobs")
    shown = answer["choices"][0]["logprobs"]
    assert shown == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.25, -1.25],
        "top_logprobs": [None, {"b": -0.25}, {"c": -1.25}],
        "text_offset": [0, 1, 2],
    }
    assert answer["choices"][0]["finish_reason"] == "length"


def test_long_prompts_are_scored_whole(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(finish=LENGTH)
    prompt = [81 + i % 26 for i in range(8000)]
    answer = completed(gateway, prompt=prompt, echo=True, logprobs=20, max_tokens=0)
    shown = answer["choices"][0]["logprobs"]
    assert "".join(shown["tokens"]) == answer["choices"][0]["text"]
    assert len(shown["token_logprobs"]) == 8000
    assert {len(top) for top in shown["top_logprobs"][1:]} == {20}
    assert shown["text_offset"] == list(range(8000))


JOINED: dict[str, Callable[[Iterable[Any]], Any]] = {
    "/v1/completions": lambda shown: {
        name: [value for logprobs in shown for value in logprobs[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    },
    "/v1/chat/completions": lambda shown: [token for logprobs in shown for token in logprobs["content"]],
}


@pytest.mark.parametrize("path", list(JOINED))
@pytest.mark.parametrize("stop", [None, " world", "🦜", "lo wor"])
def test_streamed_and_unstreamed_logprobs_are_the_same_and_end_with_the_text(
    gateway: Gateway, mesh: FakeMesh, tokenizer: ModelTokenizer, path: str, stop: str | None
) -> None:
    mesh.a.script = tokens(*tokenizer.encode("Hello world 🦜 again", special_tokens=False), END)
    body: dict[str, Any] = {"max_tokens": 30, **({} if stop is None else {"stop": stop})}
    if path == "/v1/completions":
        body |= {"prompt": "Say: ", "logprobs": 2, "echo": True}
    else:
        body |= {"messages": HI, "logprobs": True, "top_logprobs": 2}
    (whole,) = post(gateway, path, **body).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in streamed(gateway, path, **body)]
    shown = [list(chunks)[i]["logprobs"] for i in range(len(chunks)) if chunks[i]["logprobs"] is not None]
    joined = JOINED[path]([whole["logprobs"]])
    assert JOINED[path](shown) == joined
    text = whole["text"] if path == "/v1/completions" else whole["message"]["content"]
    assert text == "".join(chunk.get("text") or chunk.get("delta", {}).get("content", "") for chunk in chunks)
    assert text.endswith("Hello world 🦜 again".split(stop)[0] if stop else "again")
    if stop is not None and path == "/v1/completions":
        assert all(offset < len(text) for offset in joined["text_offset"])


def test_a_stop_string_does_not_end_a_text_before_its_least_tokens(
    gateway: Gateway, mesh: FakeMesh, tokenizer: ModelTokenizer
) -> None:
    mesh.a.script = tokens(81, 82, 81, 82)
    answer = completed(gateway, prompt="x", stop="b", min_tokens=2)
    assert answer["choices"][0]["text"] == "aba"


@pytest.mark.parametrize("value", [-2.5, "1", True])
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_p"])
def test_values_out_of_range_name_the_field(gateway: Gateway, mesh: FakeMesh, name: str, value: Any) -> None:
    response = post(gateway, prompt="x", **{name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert mesh.a.requests == []
