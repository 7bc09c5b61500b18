"""`langchain-openai`. Run in the client's own environment: `langchain_client.py BASE_URL MODEL`."""

from __future__ import annotations

import asyncio
import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import SecretStr

BASE_URL, MODEL = sys.argv[1:]
KEY = SecretStr("none")
QUESTION = "What is the capital of France? Answer in one sentence."


def check(said: object, wanted: str) -> None:
    if wanted not in str(said):
        sys.exit(f"no {wanted!r} in {said!r}")


chat = ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=40)
answer = chat.invoke(QUESTION)
check(answer.content, "Paris")
if answer.usage_metadata is None or answer.usage_metadata["output_tokens"] < 5:
    sys.exit(f"usage: {answer.usage_metadata}")
print("did invoke with usage")
chunks = list(chat.stream(QUESTION, stream_usage=True))
check("".join(str(chunk.content) for chunk in chunks), "Paris")
if not any(chunk.usage_metadata for chunk in chunks):
    sys.exit("no usage in the stream")
print("did stream with usage")
for each in chat.batch([QUESTION] * 3):
    check(each.content, "Paris")
print("did batch")
chain = ChatPromptTemplate.from_template("What is the capital of {country}? Answer in one sentence.") | chat
check((chain | StrOutputParser()).invoke({"country": "Italy"}), "Rome")
print("did chain of template, model and parser")
logged = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
if len(logged.response_metadata["logprobs"]["content"][0]["top_logprobs"]) != 2:
    sys.exit(f"logprobs: {logged.response_metadata}")
print("did logprobs")
responses = ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, temperature=0, use_responses_api=True)
check(responses.invoke(QUESTION).content, "Paris")
check("".join(str(chunk.content) for chunk in responses.stream(QUESTION)), "Paris")
print("did responses API whole and streamed")
check(OpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=8).invoke("1, 2, 3, 4,"), "5, 6")
print("did completions")


async def concurrent() -> None:
    for each in await asyncio.gather(*(chat.ainvoke(QUESTION) for _ in range(3))):
        check(each.content, "Paris")
    check("".join([str(chunk.content) async for chunk in chat.astream(QUESTION)]), "Paris")


asyncio.run(concurrent())
print("did async")
