"""`openai`: what its README shows. Run in the client's own environment: `openai_client.py BASE_URL MODEL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai

BASE_URL, MODEL = sys.argv[1:]
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}


def check(said: str | None, wanted: str) -> None:
    if wanted not in (said or ""):
        sys.exit(f"no {wanted!r} in {said!r}")


def blocking() -> None:
    client = openai.OpenAI(base_url=BASE_URL, api_key="none")
    check(client.models.list().data[0].id, MODEL)
    check(client.chat.completions.create(**ASK).choices[0].message.content, "Paris")
    print("did chat")
    with client.chat.completions.stream(**ASK) as stream:
        check(stream.get_final_completion().choices[0].message.content, "Paris")
    print("did chat streamed")
    several = client.chat.completions.create(**ASK, n=2, logprobs=True, top_logprobs=3)
    for choice in several.choices:
        check(choice.message.content, "Paris")
        if choice.logprobs is None or len((choice.logprobs.content or [])[0].top_logprobs) != 3:
            sys.exit(f"logprobs: {choice.logprobs}")
    print("did n=2 with logprobs")
    check(client.responses.create(model=MODEL, input=MESSAGES, temperature=0).output_text, "Paris")
    print("did responses")
    text = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", temperature=0, logprobs=1, echo=True)
    check(text.choices[0].text, "1, 2, 3, 4, 5, 6")
    print("did completions with echo")
    try:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    except openai.NotFoundError as error:
        check(error.message, MODEL)
        print("did NotFoundError for an unknown model")


async def concurrent() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(4)))
        for answer in answers:
            check(answer.choices[0].message.content, "Paris")
        print("did 4 async at once")
        async for _ in await client.chat.completions.create(**ASK, stream=True):
            break
        print("did async stream left")


blocking()
asyncio.run(concurrent())
