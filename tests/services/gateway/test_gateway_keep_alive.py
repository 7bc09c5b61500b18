"""Comments that keep streams alive while nothing comes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from meshnet.errors import NextHopFailed
from meshnet.v1 import inference_pb2
from tests.processes import wait_until
from tests.services.gateway.conftest import END
from tests.services.gateway.fake_mesh import Call, FakeMesh, Script, tokens, tokens_then_fail
from tests.services.gateway.gateway_process import Gateway, running_gateway

COMMENT = ": keep-alive"
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "smol", "prompt": "x"},
    "/v1/chat/completions": {"model": "smol", "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture(scope="module")
def brief(shared: tuple[FakeMesh, Gateway], smollm2_gguf: Path) -> Iterator[Gateway]:
    """A gateway whose streams soon get a comment. No test here asks for less than that."""
    arguments = ("--tracker", shared[0].address, "--model", f"smol={smollm2_gguf}", "--stream-silence", "0.2")
    with running_gateway(*arguments) as gateway:
        wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
        yield gateway


def after(opened: threading.Event, script: Script, *before: int) -> Script:
    """Sends some tokens, waits until it is let go, and does as the script does."""

    def waiting(request: inference_pb2.GenerateRequest, call: Call) -> Iterator[inference_pb2.GenerateEvent]:
        for token_id in before:
            yield inference_pb2.GenerateEvent(token_id=token_id)
        assert opened.wait(30)
        yield from script(request, call)

    return waiting


def lines_of(gateway: Gateway, path: str, on_line: Callable[[str], None]) -> list[str]:
    """The lines of a stream that are not empty. `on_line` is called with each."""
    lines = []
    url = f"{gateway.url}{path}"
    with httpx.stream("POST", url, json={**PATHS[path], "stream": True}, timeout=30) as response:
        assert response.status_code == 200
        for line in filter(None, response.iter_lines()):
            on_line(line)
            lines.append(line)
    return lines


def at_a_comment(opened: threading.Event) -> Callable[[str], None]:
    return lambda line: opened.set() if line == COMMENT else None


@pytest.mark.parametrize("path", list(PATHS))
def test_a_stream_whose_first_token_is_late_begins_with_comments(brief: Gateway, mesh: FakeMesh, path: str) -> None:
    opened = threading.Event()
    mesh.a.script = after(opened, tokens(81, 82, END))
    lines = lines_of(brief, path, at_a_comment(opened))
    assert COMMENT in lines
    first_text = next(i for i, line in enumerate(lines) if '"a"' in line)
    assert lines.index(COMMENT) < first_text
    assert lines[-1] == "data: [DONE]"


def test_silence_in_mid_stream_is_filled_with_comments(brief: Gateway, mesh: FakeMesh) -> None:
    opened, begun = threading.Event(), threading.Event()

    def token_or_comment(line: str) -> None:
        if line != COMMENT:
            begun.set()
        elif begun.is_set():
            opened.set()

    mesh.a.script = after(opened, tokens(82, END), 81)
    lines = lines_of(brief, "/v1/completions", token_or_comment)
    texts = [line if line == COMMENT else json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert COMMENT in texts[texts.index("a") : texts.index("b")]
    assert "".join(text for text in texts if text != COMMENT) == "ab"


def test_what_fails_before_a_comment_has_its_own_status(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_fail(NextHopFailed("hop b failed", "b"))
    response = httpx.post(f"{gateway.url}/v1/completions", json={**PATHS["/v1/completions"], "stream": True})
    assert response.status_code == 502


@pytest.mark.parametrize("path", list(PATHS))
def test_what_fails_after_a_comment_is_an_event_and_the_end(brief: Gateway, mesh: FakeMesh, path: str) -> None:
    opened = threading.Event()
    mesh.a.script = after(opened, tokens_then_fail(NextHopFailed("hop b failed", "b")))
    lines = lines_of(brief, path, at_a_comment(opened))
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "next_hop_failed"


def test_unstreamed_answers_have_no_comments(brief: Gateway, mesh: FakeMesh) -> None:
    """The stream beside it shows that there was silence enough."""
    opened = threading.Event()
    mesh.a.script = after(opened, tokens(81, END))
    answers: list[httpx.Response] = []
    url = f"{brief.url}/v1/completions"
    asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=PATHS["/v1/completions"], timeout=30)))
    asking.start()
    lines_of(brief, "/v1/completions", at_a_comment(opened))
    asking.join(30)
    assert answers[0].json()["choices"][0]["text"] == "a"


def test_the_official_client_does_not_notice(brief: Gateway, mesh: FakeMesh) -> None:
    """It has had a comment when a stream that began later has."""
    opened = threading.Event()
    mesh.a.script = after(opened, tokens(82, END), 81)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{brief.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        stream = client.chat.completions.create(model="smol", messages=messages, stream=True)
        first = next(stream).choices[0].delta
        lines_of(brief, "/v1/completions", at_a_comment(opened))
        rest = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert (first.content or "") + "".join(rest) == "ab"
