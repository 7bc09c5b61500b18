"""`lm_eval` through a gateway and on transformers with the same weights: their scores must be the same.

Its tasks are made of the first chapter of Alice's Adventures in Wonderland: of four ways in which a paragraph may go on
the right one is chosen (`multiple_choice`), the whole text is scored in windows (`loglikelihood_rolling`), and counting
is gone on with (`generate_until`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clients.environments import ClientFailed, Environment
from tests.clients.running import Gateway

ALICE = Path(__file__).parents[2] / "benchmarks" / "data" / "alice.txt"
NUM_CHOICES = 4
CHOICE_WORDS = 10
MAX_LENGTH = 2048
TASKS = ("alice_choices", "alice_text", "counting")
# What bfloat16 explains: nats of one continuation of a dozen tokens, and relative to the perplexity of the text.
MAX_NATS = 1.0
MAX_PERPLEXITY_CHANGE = 0.01

_COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
"""
_YAML = {
    "alice_choices": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "alice_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "counting": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [",", "\\n"], max_gen_toks: 8, do_sample: false}
filter_list: [{name: stripped, filter: [{function: remove_whitespace}, {function: take_first}]}]
metric_list: [{metric: exact_match}]
""",
}


def evaluate(environment: Environment, gateway: Gateway) -> str:
    """Raises ClientFailed if a score through the gateway is another than on transformers."""
    _write_tasks(environment.home)
    weights = _weights(environment.home, gateway.gguf)
    served = _scores(
        environment,
        "gateway",
        ("--model", "local-completions", "--batch_size", "4", "--model_args"),
        f"model={gateway.model},base_url={gateway.base_url}/completions,tokenizer={weights},tokenizer_backend=huggingface,"
        f"max_length={MAX_LENGTH},num_concurrent=2",
    )
    # One token of the length is the API's, which always generates one. Its own default is to round probabilities.
    unsharded = _scores(
        environment,
        "transformers",
        ("--model", "hf", "--batch_size", "1", "--device", "cpu", "--model_args"),
        f"pretrained={weights},dtype=bfloat16,softmax_dtype=float32,max_length={MAX_LENGTH - 1}",
    )
    return _compared(served, unsharded)


def _write_tasks(folder: Path) -> None:
    documents = {"alice_choices": _choices(), "alice_text": [{"text": ALICE.read_text()}], "counting": _counting()}
    for name in TASKS:
        (folder / f"{name}.yaml").write_text(_COMMON.format(name=name) + _YAML[name])
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents[name]))


def _choices() -> list[dict[str, Any]]:
    paragraphs = [words for text in ALICE.read_text().split("\n\n") if len(words := text.split()) > 2 * CHOICE_WORDS]
    halves = [len(words) // 2 for words in paragraphs]
    ways = [" ".join(words[half : half + CHOICE_WORDS]) for words, half in zip(paragraphs, halves, strict=True)]
    return [
        {
            "context": " ".join(words[:half]),
            # The right one is among the next ones at a place that changes.
            "choices": [ways[(index - index % NUM_CHOICES + way) % len(ways)] for way in range(NUM_CHOICES)],
            "label": index % NUM_CHOICES,
        }
        for index, (words, half) in enumerate(zip(paragraphs, halves, strict=True))
    ]


def _counting() -> list[dict[str, Any]]:
    return [
        {"context": ", ".join(map(str, range(start, start + 6))) + ",", "answer": str(start + 6)} for start in range(12)
    ]


def _weights(folder: Path, gguf: Path) -> Path:
    """The model as a Hugging Face directory in bfloat16, with its tokenizer."""
    weights = folder / "weights"
    if not (weights / "tokenizer.json").exists():
        command = [sys.executable, "-m", "benchmarks.peers.save", str(gguf), str(weights)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    return weights


def _scores(environment: Environment, name: str, model: tuple[str, ...], model_arguments: str) -> dict[str, Any]:
    """What it writes: `results` by task, and `samples`, whose log-likelihoods are those of each document."""
    output = environment.home / name
    shutil.rmtree(output, ignore_errors=True)
    environment.run(
        [
            *("lm_eval", *model, model_arguments, "--tasks", ",".join(TASKS), "--include_path", "."),
            *("--output_path", name, "--log_samples"),
        ],
        HF_DATASETS_CACHE=str(environment.home / "datasets"),
        TOKENIZERS_PARALLELISM="false",
    )
    (written,) = output.glob("**/results_*.json")
    samples = {}
    for task in TASKS:
        (lines,) = output.glob(f"**/samples_{task}_*.jsonl")
        documents = [json.loads(line) for line in lines.read_text().splitlines()]
        samples[task] = [document["resps"] for document in sorted(documents, key=lambda one: int(one["doc_id"]))]
    return {"results": json.loads(written.read_text())["results"], "samples": samples}


def _compared(served: dict[str, Any], unsharded: dict[str, Any]) -> str:
    said = []
    for task, metric in (
        ("alice_choices", "acc,none"),
        ("alice_choices", "acc_norm,none"),
        ("counting", "exact_match,stripped"),
    ):
        ours, theirs = (scores["results"][task][metric] for scores in (served, unsharded))
        if ours != theirs:
            raise ClientFailed(f"{task}: {metric} is {ours} through the gateway, {theirs} on transformers")
        said.append(f"{task} {metric.partition(',')[0]} {ours:.4f} = {theirs:.4f}")
    pairs = zip(_log_likelihoods(served), _log_likelihoods(unsharded), strict=True)
    nats = max(abs(ours - theirs) for ours, theirs in pairs)
    if nats > MAX_NATS:
        raise ClientFailed(f"a continuation's log-likelihood differs by {nats:.2f}")
    ours, theirs = (scores["results"]["alice_text"]["word_perplexity,none"] for scores in (served, unsharded))
    if abs(ours / theirs - 1) > MAX_PERPLEXITY_CHANGE:
        raise ClientFailed(f"the perplexity is {ours} through the gateway, {theirs} on transformers")
    said.append(f"continuations differ by {nats:.2f} nats at most")
    said.append(f"alice_text word_perplexity {ours:.3f} and {theirs:.3f}")
    return ", ".join(said)


def _log_likelihoods(scores: dict[str, Any]) -> list[float]:
    """Of every choice of every question."""
    return [float(choice[0][0]) for question in scores["samples"]["alice_choices"] for choice in question]
