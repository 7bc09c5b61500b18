"""`meshnet chat` at a real terminal, with a real gateway before a mesh that answers what a test wants."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from meshnet.errors import NextHopFailed
from tests.processes import wait_until
from tests.services.gateway.fake_mesh import FakeMesh, model, shard, tokens, tokens_then_fail, tokens_then_wait
from tests.services.gateway.gateway_process import Gateway, running_gateway
from tests.terminal import CTRL_C, CTRL_D, ENTER, TAB, UP, Terminal

# Tokens of SmolLM2.
A, B, C, X, Y, Z = 81, 82, 83, 104, 105, 106
READY = "\n> "


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def running(smollm2_gguf: Path) -> Iterator[tuple[FakeMesh, Gateway]]:
    with FakeMesh() as mesh:
        mesh.tell(mesh.a.node(shard("other"), shard("smol")), smol=model("smol"), other=model("other"))
        with running_gateway("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}") as gateway:
            wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
            yield mesh, gateway


@pytest.fixture
def mesh(running: tuple[FakeMesh, Gateway]) -> FakeMesh:
    running[0].a.script = tokens(A, B, C)
    running[0].a.requests.clear()
    return running[0]


@pytest.fixture
def gateway(mesh: FakeMesh, running: tuple[FakeMesh, Gateway]) -> Gateway:
    return running[1]


@pytest.fixture
def chat(gateway: Gateway) -> Iterator[Terminal]:
    with Terminal(["-m", "meshnet.cli", "chat", "--url", gateway.url, "--model", "smol"]) as terminal:
        terminal.wait_for(READY)
        yield terminal


def ask(chat: Terminal, line: str) -> str:
    """What is shown between a line that is typed and the next prompt."""
    chat.press(line + ENTER)
    chat.wait_for(line)
    return chat.wait_for(READY).strip()


def asked(mesh: FakeMesh, tokenizer: Any) -> str:
    """The prompt of the latest request."""
    return str(tokenizer.decode(list(mesh.a.requests[-1].prompt_token_ids)))


def test_ctrl_c_stops_the_answer_and_the_next_question_knows_what_there_was(
    chat: Terminal, mesh: FakeMesh, tokenizer: Any
) -> None:
    mesh.a.script = tokens_then_wait(A, B, C)
    chat.press("Tell me all." + ENTER)
    chat.wait_for("abc")
    chat.press(CTRL_C)
    chat.wait_for("[stopped]")
    chat.wait_for(READY)
    assert mesh.a.has_ended(mesh.a.requests[0].request_id, timeout=20)
    mesh.a.script = tokens(X, Y, Z)
    assert ask(chat, "Go on.") == "xyz"
    prompt = asked(mesh, tokenizer)
    for turn in ("user\nTell me all.", "assistant\nabc", "user\nGo on."):
        assert turn in prompt
    chat.press(CTRL_D)
    assert chat.wait_for_end() == 0


def test_ctrl_c_before_the_first_token_and_at_the_prompt(chat: Terminal, mesh: FakeMesh, tokenizer: Any) -> None:
    mesh.a.script = tokens_then_wait()
    chat.press("Too slow." + ENTER)
    wait_until(lambda: bool(mesh.a.requests))
    chat.press(CTRL_C)
    chat.wait_for("[stopped]")
    chat.wait_for(READY)
    mesh.a.script = tokens(A)
    chat.press("never sent" + CTRL_C)
    chat.wait_for(READY)
    assert ask(chat, "Once more.") == "a"
    # A question without an answer is not repeated: two in a row would be against many templates.
    assert "Too slow" not in asked(mesh, tokenizer)
    assert "never sent" not in asked(mesh, tokenizer)


def test_commands(chat: Terminal, mesh: FakeMesh, tokenizer: Any) -> None:
    assert "/retry" in ask(chat, "/help")
    assert "no question" in ask(chat, "/retry")
    assert "no answer" in ask(chat, "/stats")
    assert ask(chat, "/system Be brief.") == ""
    assert ask(chat, "/system") == "Be brief."
    assert ask(chat, "Hello.") == "abc"
    assert "system\nBe brief." in asked(mesh, tokenizer)
    stats = ask(chat, "/stats")
    assert "first token after" in stats
    assert "3 tokens, prompt of" in stats
    mesh.a.script = tokens(X)
    assert ask(chat, "/temperature 0.5") == ""
    assert ask(chat, "/retry") == "x"
    assert mesh.a.requests[-1].sampling.temperature == 0.5
    assert mesh.a.requests[-1].prompt_token_ids == mesh.a.requests[0].prompt_token_ids
    assert ask(chat, "/model").split() == ["other", "*", "smol"]
    assert "other, smol" in ask(chat, "/model nobody")
    assert "no /cleer" in ask(chat, "/cleer")
    assert ask(chat, "/clear") == ""
    assert ask(chat, "Anew.") == "x"
    assert "Hello" not in asked(mesh, tokenizer)
    assert "Be brief." in asked(mesh, tokenizer)
    chat.press("/quit" + ENTER)
    assert chat.wait_for_end() == 0


def test_keys_edit_lines_and_bring_back_earlier_ones(chat: Terminal, mesh: FakeMesh, tokenizer: Any) -> None:
    assert ask(chat, "Hello.") == "abc"
    chat.press(UP + "\x01Oh: " + ENTER)  # to the beginning of the line
    chat.wait_for(READY)
    assert "user\nOh: Hello." in asked(mesh, tokenizer)
    chat.press("/st" + TAB + ENTER)
    assert "first token after" in chat.wait_for(READY)


def test_an_answer_that_fails_is_told_and_can_be_asked_again(chat: Terminal, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_fail(NextHopFailed("it burns", "node-7"), A)
    assert "it burns" in ask(chat, "Hello.")
    mesh.a.script = tokens(B)
    assert ask(chat, "/retry") == "b"
    assert "no tokenizer files" in ask(chat, "/model other") + ask(chat, "Hello.")


def test_an_answer_cannot_command_the_terminal(chat: Terminal, mesh: FakeMesh, tokenizer: Any) -> None:
    mesh.a.script = tokens(*tokenizer("x\x1b[31mred\x07\ttab\nline", add_special_tokens=False)["input_ids"])
    assert ask(chat, "Hello.") == "x[31mred\ttab\r\nline"


def test_questions_over_a_pipe_are_answered_with_nothing_around_it(mesh: FakeMesh, gateway: Gateway) -> None:
    def piped(given: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshnet.cli", "chat", "--url", gateway.url, "--model", "smol"]
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)

    done = piped("Hello.\n/system Be brief.\nAgain.")
    assert (done.returncode, done.stdout, done.stderr) == (0, "abc\nabc\n", "")
    mesh.a.script = tokens_then_fail(NextHopFailed("it burns", "node-7"))
    failed = piped("Hello.")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "it burns" in failed.stderr


def test_a_gateway_that_goes_away_is_named_with_what_to_do(smollm2_gguf: Path) -> None:
    with FakeMesh() as mesh:
        mesh.tell(mesh.a.node(shard("smol")), smol=model("smol"))
        mesh.a.script = tokens(A)
        with running_gateway("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}") as gateway:
            wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
            with Terminal(["-m", "meshnet.cli", "chat", "--url", gateway.url]) as chat:
                chat.wait_for(READY)
                assert ask(chat, "Hello.") == "a"
                gateway.process.stop()
                said = ask(chat, "Are you there?")
                assert "no gateway answers at" in said
                assert "--url names another" in said.replace("\r\n", "")
