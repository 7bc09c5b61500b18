"""What prefix reuse saves: time to the first token of each turn of a chat, with and without it.

    python -m benchmarks.prefix_reuse

SmolLM2-135M in bfloat16 on two nodes of one thread each, behind a gateway. A system prompt of about 1000 tokens, five
turns, and then another chat with the same system prompt. One mesh that reuses prefixes and one that does not run side
by side and are asked in turn, so that what else the machine does is the same for both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.streams import KV_TOKENS, MODEL, REQUEST_SECONDS, specs
from tests.e2e.mesh import running_mesh
from tests.smollm2 import smollm2_path

TEXT = (Path(__file__).parent / "data" / "alice.txt").read_text().split()
# About 1000 tokens.
SYSTEM_WORDS = 740
NEW_TOKENS = 48
TURNS = (
    "Who is this text about?",
    "Where does it take place, and what happens there first?",
    "What would you ask her if you met her, and why that?",
    "Write a short summary for somebody who has never heard of it.",
    "And now the same in one sentence.",
)
OTHER = "Which animals are in the text?"
OTHER_NAME = "another chat"


@dataclass(frozen=True)
class Turn:
    """Tokens of the prompt, how many of them were reused, and seconds until the first new one."""

    prompt: int
    cached: int
    first: float


def ask(client: httpx.Client, url: str, messages: list[dict[str, str]]) -> tuple[Turn, str]:
    body = {
        "model": MODEL, "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, usage, first = "", dict[str, Any](), None
    started = time.monotonic()
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                # The answer begins with the first token.
                first = first or time.monotonic() - started
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                text += "".join(choice["delta"].get("content", "") for choice in event["choices"])
    assert first is not None, "an answer has events"
    return Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], first), text


def chat(client: httpx.Client, url: str, system: str) -> dict[str, Turn]:
    """Five turns, and one of another chat."""
    turns: dict[str, Turn] = {}
    messages = [{"role": "system", "content": system}]
    for number, question in enumerate(TURNS, 1):
        messages.append({"role": "user", "content": question})
        turns[f"turn {number}"], text = ask(client, url, messages)
        messages.append({"role": "assistant", "content": text})
    turns[OTHER_NAME], _ = ask(client, url, [messages[0], {"role": "user", "content": OTHER}])
    return turns


def system_prompt(repeat: int) -> str:
    """Other words at each repeat, so that nothing is left of the one before."""
    start = 60 * repeat
    return f"Answer questions about this text. ({repeat}) " + " ".join(TEXT[start : start + SYSTEM_WORDS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="Medians of so many chats.")
    repeats = parser.parse_args().repeats
    seen: dict[bool, dict[str, list[Turn]]] = {True: defaultdict(list), False: defaultdict(list)}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=REQUEST_SECONDS))
        urls = {}
        for reuse in (False, True):
            option = () if reuse else ("--no-prefix-reuse",)
            nodes = [replace(spec, options=option) for spec in specs(2)]
            mesh = running_mesh([f"{MODEL}={smollm2_path()}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True)
            urls[reuse] = stack.enter_context(mesh).gateway_url
        for url in urls.values():
            ask(client, url, [{"role": "user", "content": "Hello"}])
        for repeat in range(repeats):
            for reuse in (False, True) if repeat % 2 else (True, False):
                for name, turn in chat(client, urls[reuse], system_prompt(repeat)).items():
                    seen[reuse][name].append(turn)
    Console().print(_table(seen))


def _table(seen: dict[bool, dict[str, list[Turn]]]) -> Table:
    table = Table(
        "", "prompt", "reused", "first token without, ms", "with, ms", "saved", title="Time to the first token, medians"
    )
    for name, turns in seen[True].items():
        without, with_reuse = (1000 * statistics.median(t.first for t in seen[reuse][name]) for reuse in (False, True))
        table.add_row(
            name, f"{statistics.median(turn.prompt for turn in turns):.0f}",
            f"{statistics.median(turn.cached for turn in turns):.0f}", f"{without:.0f}", f"{with_reuse:.0f}",
            f"{without / with_reuse:.1f} x",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
