"""One stream over slow links, with speculation and without: tokens a second, and whether they are the same tokens.

    python -m benchmarks.speculation

SmolLM2-135M in bfloat16 on four nodes of one thread each, greedy. Everything that nodes tell each other takes 20 ms
more on its way, through relays (tests/faults/proxy.py): a step passes three hops and comes back by a fourth way.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.links.relays import DIRECT, relayed_mesh
from benchmarks.streams import MODEL
from meshnet.addresses import split_address
from meshnet.speculate import Speculate
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.mesh import CALL_SECONDS, Mesh
from tests.smollm2 import smollm2_path

LINES = (
    "The tide tables hang beside the door of the harbour office, next to a barometer that nobody has wound since "
    "spring. Boats leave at six and come home at noon, with herring in blue crates and ropes stiff with salt. "
    "On Sundays the bell is rung twice, once for the church and once for the ferry."
)
RECORD = """{
  "name": "North Harbour Storage",
  "address": {"street": "12 Quay Road", "city": "Bergen", "country": "Norway"},
  "contact": {"email": "office@harbour.example", "phone": "+47 555 0199"},
  "opening_hours": {"monday": "08:00-17:00", "tuesday": "08:00-17:00", "saturday": "closed"},
  "status": "open"
}"""
TASKS = {
    "repeat a text": f"Repeat the following text exactly, word for word:\n\n{LINES}",
    "change a field of JSON": f'Rewrite this JSON with "status" set to "closed" and all else unchanged:\n\n{RECORD}',
    "answer a question": "Why is the sky blue? Explain it to a child.",
}


@dataclass(frozen=True)
class Outcome:
    """`seconds`: from the first token to the last, without the prompt. `drafts`: counts of the entry node."""

    tokens: tuple[int, ...]
    seconds: float
    drafts: dict[str, int]

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


def ask(mesh: Mesh, prompt: Sequence[int], stop: int, max_new_tokens: int) -> Outcome:
    before = mesh_drafts(mesh)
    port = split_address(mesh.nodes["n0"].match[2])[1]
    with grpc.insecure_channel(f"{DIRECT}:{port}") as channel:
        request = inference_pb2.GenerateRequest(
            request_id=str(uuid.uuid4()), model_id=MODEL, prompt_token_ids=prompt, max_new_tokens=max_new_tokens,
            stop_token_ids=[stop], sampling=inference_pb2.SamplingParams(temperature=0.0),
        )  # fmt: skip
        tokens, moments = [], []
        for event in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=CALL_SECONDS):
            tokens.append(event.token_id)
            moments.append(time.monotonic())
    after = mesh_drafts(mesh)
    return Outcome(tuple(tokens), moments[-1] - moments[0], {name: after[name] - before[name] for name in after})


def mesh_drafts(mesh: Mesh) -> dict[str, int]:
    drafts: dict[str, int] = mesh.health("n0")["drafts"]
    return drafts


def measure(
    speculate: Speculate, prompts: dict[str, list[int]], stop: int, arguments: argparse.Namespace
) -> dict[str, Outcome]:
    """For each task the run of median speed."""
    with relayed_mesh(arguments.nodes, arguments.delay_ms / 1000, "--speculate", speculate.value) as mesh:
        ask(mesh, next(iter(prompts.values())), stop, 16)
        outcomes: dict[str, Outcome] = {}
        for task, prompt in prompts.items():
            runs = [ask(mesh, prompt, stop, arguments.tokens) for _ in range(arguments.repeats)]
            assert len({run.tokens for run in runs}) == 1 or speculate is Speculate.AUTO
            speed = statistics.median_low(run.tokens_per_second for run in runs)
            outcomes[task] = next(run for run in runs if run.tokens_per_second == speed)
        return outcomes


def common(first: Sequence[int], second: Sequence[int]) -> str:
    """Whether the tokens are the same, and where not."""
    if tuple(first) == tuple(second):
        return f"all {len(first)}"
    same = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    return f"{same} of {len(first)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--delay-ms", type=float, default=20.0, help="On each way, in each direction.")
    parser.add_argument("--tokens", type=int, default=160, help="At most so many new ones.")
    parser.add_argument("--repeats", type=int, default=3, help="The median of so many runs counts.")
    arguments = parser.parse_args()
    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = {
        task: tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
        for task, text in TASKS.items()
    }
    off, auto = (
        measure(speculate, prompts, tokenizer.eos_token_id, arguments) for speculate in (Speculate.OFF, Speculate.AUTO)
    )
    table = Table(
        "task", "tokens/s off", "auto", "ratio", "steps off", "auto", "accepted of drafted", "same tokens",
        title=f"{arguments.nodes} nodes, {arguments.delay_ms:g} ms more on each way (relays), one stream",
    )  # fmt: skip
    for task in TASKS:
        before, after = off[task], auto[task]
        table.add_row(
            task, f"{before.tokens_per_second:.1f}", f"{after.tokens_per_second:.1f}",
            f"{after.tokens_per_second / before.tokens_per_second:.2f}x",
            str(before.drafts["steps"]), str(after.drafts["steps"]),
            f"{after.drafts['accepted']} of {after.drafts['drafted']}", common(before.tokens, after.tokens),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
