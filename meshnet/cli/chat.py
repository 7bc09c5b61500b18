"""`meshnet chat` and the demo's question: a conversation with a model through the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import typer

CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 300.0

Message = dict[str, str]


class ChatFailed(Exception):
    """The gateway answered with an error, or not at all; the message is for people."""


@dataclass(frozen=True, slots=True)
class Answering:
    """Whom to ask and how. `max_tokens` None: as many as the model has room for."""

    url: str
    model: str
    max_tokens: int | None = None
    temperature: float = 0.0


def stream_chat(answering: Answering, messages: list[Message]) -> Iterator[str]:
    """Pieces of the answer's text as they arrive. Raises ChatFailed."""
    body: dict[str, Any] = {
        "model": answering.model,
        "messages": messages,
        "stream": True,
        "temperature": answering.temperature,
    }
    if answering.max_tokens:
        body["max_tokens"] = answering.max_tokens
    url = answering.url
    timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=timeout) as answer:
            if answer.status_code != 200:
                raise ChatFailed(_message(answer.read()))
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _text(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        raise ChatFailed(f"no gateway answers at {url}: {error}") from error


def first_model(url: str) -> str:
    """The only model of the mesh, or the first. Raises ChatFailed if there is none."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=CONNECT_TIMEOUT)
        models = answer.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ChatFailed(f"no gateway answers at {url}: {error}") from error
    if not models:
        raise ChatFailed("the mesh serves no model yet: `meshnet status` shows what is missing")
    name: str = models[0]["id"]
    return name


def run_chat(answering: Answering, system: str | None) -> None:
    """Reads questions from the terminal until end of file or an empty Ctrl-C."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    typer.echo(f"Chatting with {answering.model}. Ctrl-C stops an answer, Ctrl-D ends.")
    while True:
        try:
            question = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if question:
            messages.append({"role": "user", "content": question})
            try:
                messages.append({"role": "assistant", "content": print_answer(answering, messages)})
            except KeyboardInterrupt:
                # The conversation goes on as if the question had not been put.
                typer.echo("[stopped]")
                messages.pop()


def print_answer(answering: Answering, messages: list[Message]) -> str:
    """Streams an answer to the terminal and returns it, or what there was of it when it failed."""
    answer = ""
    try:
        for text in stream_chat(answering, messages):
            typer.echo(text, nl=False)
            answer += text
    except ChatFailed as error:
        typer.echo(f"[{error}]", err=True, nl=False)
    finally:
        typer.echo()
    return answer


def _text(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise ChatFailed(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _message(body: bytes) -> str:
    try:
        message: str = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")
    return message
