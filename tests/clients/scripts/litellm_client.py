"""`litellm`. Run in the client's own environment: `litellm_client.py BASE_URL MODEL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import litellm

BASE_URL, MODEL = sys.argv[1:]
# Else it prints where to get help whenever it meets a name that it has no price for.
litellm.suppress_debug_info = True
WHERE: dict[str, Any] = {"api_base": BASE_URL, "api_key": "none", "temperature": 0, "max_tokens": 40}
ASK: dict[str, Any] = {
    **WHERE,
    "model": f"openai/{MODEL}",
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
}


def check(said: str | None, wanted: str) -> None:
    if wanted not in (said or ""):
        sys.exit(f"no {wanted!r} in {said!r}")


answer = litellm.completion(**ASK, n=2, logprobs=True, top_logprobs=2)
check(answer.choices[1].message.content, "Paris")
if answer.usage.completion_tokens < 5 or len(answer.choices[0].logprobs.content[0].top_logprobs) != 2:
    sys.exit(f"usage or logprobs: {answer}")
print("did completion with n=2 and logprobs")
chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
check("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), "Paris")
check(litellm.stream_chunk_builder(chunks).choices[0].message.content, "Paris")
print("did stream with usage")
text = litellm.text_completion(**WHERE, model=f"text-completion-openai/{MODEL}", prompt="1, 2, 3, 4,")
check(text.choices[0].text, "5, 6")
print("did text_completion")
said = litellm.responses(
    model=f"openai/{MODEL}", input=ASK["messages"], api_base=BASE_URL, api_key="none", temperature=0
)
check(said.output[0].content[0].text, "Paris")
print("did responses")
try:
    litellm.completion(**{**ASK, "max_tokens": 100_000})
except litellm.ContextWindowExceededError as error:
    check(str(error), "maximum context length")
    print("did ContextWindowExceededError")


async def concurrent() -> None:
    for each in await asyncio.gather(*(litellm.acompletion(**ASK) for _ in range(4))):
        check(each.choices[0].message.content, "Paris")
    stream = await litellm.acompletion(**ASK, stream=True)
    check("".join([chunk.choices[0].delta.content or "" async for chunk in stream]), "Paris")


asyncio.run(concurrent())
print("did async")
