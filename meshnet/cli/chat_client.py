"""A gateway as `meshnet chat` asks it: its models, and answers as they are generated."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from meshnet.cli.conversation import Message
from meshnet.security.bearer import bearer
from meshnet.security.shared_secret import SharedSecret

CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 300.0


class ChatFailed(Exception):
    """The gateway answered with an error, or not at all; the message says to people what to do."""


@dataclass(frozen=True, slots=True)
class Answering:
    """Whom to ask and how. `max_tokens` None: as many as the model has room for."""

    url: str
    model: str
    max_tokens: int | None = None
    temperature: float = 0.0
    secret: SharedSecret | None = None


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of the text, or what the whole took: `prompt_tokens`, `completion_tokens` and `cached_tokens`."""

    text: str = ""
    usage: dict[str, int] | None = None
    finish_reason: str | None = None


def stream_chat(answering: Answering, messages: Sequence[Message]) -> Generator[AnswerPart, None, None]:
    """The answer as it arrives. Closing the iterator stops it on the mesh, too. Raises ChatFailed."""
    body: dict[str, Any] = {
        "model": answering.model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": answering.temperature,
    }
    if answering.max_tokens:
        body["max_tokens"] = answering.max_tokens
    timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
    is_whole = False
    try:
        url, auth = f"{answering.url}/v1/chat/completions", bearer(answering.secret)
        with httpx.stream("POST", url, json=body, timeout=timeout, auth=auth) as answer:
            if answer.status_code != 200:
                answer.read()
                raise ChatFailed(_refusal(answer))
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    is_whole = True
                elif line.startswith("data: "):
                    yield from _parts(json.loads(line.removeprefix("data: ")))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise _unreachable(answering.url, error) from error
    if not is_whole:
        raise ChatFailed("the gateway ended the answer early; /retry asks again")


def model_names(url: str, secret: SharedSecret | None = None) -> list[str]:
    """Of all models of the mesh. Raises ChatFailed if there is none."""
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=CONNECT_TIMEOUT, auth=bearer(secret))
        if answer.status_code != 200:
            raise ChatFailed(_refusal(answer))
        names = [str(model["id"]) for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ChatFailed(f"what answers at {url} is no gateway: --url names another") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _unreachable(url, error) from error
    if not names:
        raise ChatFailed("the mesh serves no model yet: `meshnet status` shows what is missing")
    return names


def first_model(url: str, secret: SharedSecret | None = None) -> str:
    """The only model of the mesh, or the first. Raises ChatFailed if there is none."""
    return model_names(url, secret)[0]


def _parts(event: dict[str, Any]) -> Iterator[AnswerPart]:
    if "error" in event:
        raise ChatFailed(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        text, reason = choice.get("delta", {}).get("content"), choice.get("finish_reason")
        if text or reason:
            yield AnswerPart(text or "", finish_reason=reason)
    if usage := event.get("usage"):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        yield AnswerPart(
            usage={
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
                "cached_tokens": cached,
            }
        )


def _unreachable(url: str, error: Exception) -> ChatFailed:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ChatFailed(
            f"no gateway answers at {url} ({error}). `meshnet up` or `meshnet tracker-node` starts one; "
            "--url names another."
        )
    if isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return ChatFailed(f"{url} is no address of a gateway ({error}): --url takes one like http://127.0.0.1:8000")
    return ChatFailed(f"the connection to the gateway at {url} was lost ({str(error) or type(error).__name__})")


def _refusal(answer: httpx.Response) -> str:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"what answers at {answer.url} is no gateway (status {answer.status_code}): --url names another"
    wait = answer.headers.get("Retry-After")
    return f"{message} Worth another try in {wait} s." if wait else message
