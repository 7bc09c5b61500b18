"""Clients of a gateway that stream completions, all at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import openai

from tests.e2e.tiny import token_ids
from tests.processes import wait_until

STREAM_SECONDS = 120.0


class Streams:
    """One client a prompt (token ids), each asking for `num_tokens` greedy tokens.

    `on_token` is called in the thread of a client at each of its tokens, with the number of the client and of tokens.
    """

    def __init__(
        self,
        gateway_url: str,
        model_id: str,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        on_token: Callable[[int, int], None] = lambda index, count: None,
        api_key: str = "none",
    ) -> None:
        self._client = openai.OpenAI(
            base_url=f"{gateway_url}/v1", api_key=api_key, max_retries=0, timeout=STREAM_SECONDS
        )
        self._model_id = model_id
        self._num_tokens = num_tokens
        self._on_token = on_token
        self.began = time.monotonic()
        self.arrivals: list[list[float]] = [[] for _ in prompts]
        """By client when each token came, on the monotonic clock."""
        self._pool = ThreadPoolExecutor(len(prompts))
        self._answers: list[Future[list[int]]] = [
            self._pool.submit(self._stream, index, list(prompt)) for index, prompt in enumerate(prompts)
        ]

    def wait_until_all_run(self) -> None:
        """Each has some tokens."""
        wait_until(
            lambda: min(map(len, self.arrivals)) > 2 or self._any_failed(), STREAM_SECONDS, "all streams have begun"
        )
        assert self.num_running == len(self._answers), [f.exception() for f in self._answers if f.done()]

    @property
    def num_running(self) -> int:
        return sum(not answer.done() for answer in self._answers)

    def tokens(self) -> list[list[int]]:
        """What each has got. Raises what a client has met, or AssertionError if a stream is not complete."""
        answers = [answer.result(STREAM_SECONDS) for answer in self._answers]
        assert [len(answer) for answer in answers] == [self._num_tokens] * len(answers)
        return answers

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown()

    def _arrived(self, index: int, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.arrivals[index].append(time.monotonic())
            self._on_token(index, len(self.arrivals[index]))

    def _any_failed(self) -> bool:
        return any(answer.done() for answer in self._answers)

    def _stream(self, index: int, prompt: list[int]) -> list[int]:
        chunks = self._client.completions.create(
            model=self._model_id,
            prompt=prompt,
            max_tokens=self._num_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces, reasons = [], []
        for chunk in chunks:
            pieces.append(chunk.choices[0].text)
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
            self._arrived(index, len(token_ids(chunk.choices[0].text)))
        assert reasons == ["length"], reasons
        return token_ids("".join(pieces))


@contextlib.contextmanager
def streams(
    gateway_url: str,
    model_id: str,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    on_token: Callable[[int, int], None] = lambda index, count: None,
    api_key: str = "none",
) -> Iterator[Streams]:
    """As Streams."""
    clients = Streams(gateway_url, model_id, prompts, num_tokens, on_token, api_key)
    try:
        yield clients
    finally:
        clients.close()
