"""What the mesh answers at each precision of KV caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from rich.table import Table

from benchmarks.kv_precision.running import COMPARISONS, Whole, compare, load
from meshnet.model import BLOCK_TOKENS, KvPrecision, Quantization
from services.node.core.choices import Choice
from services.node.core.work import SampleWork, Sampling

DECODED = 120
ANSWERS, ANSWER_TOKENS, PROMPT_TOKENS = 16, 48, 60


def output_tables(tokens: Sequence[int]) -> Iterator[Table]:
    exact = load(Quantization.FLOAT32, KvPrecision.BFLOAT16, len(tokens)).logits("exact", tokens)
    for quantization in (Quantization.BFLOAT16, Quantization.FLOAT32):
        yield from _tables(quantization, tokens, exact)


def _tables(quantization: Quantization, tokens: Sequence[int], exact: torch.Tensor) -> Iterator[Table]:
    chunked = Table(
        title=f"{quantization} weights: {len(tokens)} tokens in chunks, against float32 with float32 caches"
    )
    decoded = Table(title=f"The last {DECODED} of these tokens one by one, against the same")
    answers = Table(title=f"{ANSWERS} greedy answers of {ANSWER_TOKENS} tokens, against caches at bfloat16")
    for table in (chunked, decoded):
        for column in ("KV cache", *COMPARISONS):
            table.add_column(column)
    for column in ("KV cache", "equal answers", "equal tokens until they part", "KV bytes a token"):
        answers.add_column(column)
    wanted: list[list[int]] = []
    for kv in KvPrecision:
        name = str(kv if kv is KvPrecision.INT8 else quantization)
        whole = load(quantization, kv, len(tokens) + ANSWERS * BLOCK_TOKENS)
        compare(chunked, name, whole.logits("text", tokens), exact, tokens)
        behind = len(tokens) - DECODED
        compare(decoded, name, whole.logits("text", tokens[behind:], 1, behind), exact[behind:], tokens[behind:])
        found = greedy(whole, [tokens[i * PROMPT_TOKENS :][:PROMPT_TOKENS] for i in range(ANSWERS)])
        wanted = wanted or found
        equal = sum(a == b for a, b in zip(found, wanted, strict=True))
        alike = sum(common(a, b) for a, b in zip(found, wanted, strict=True)) / (ANSWERS * ANSWER_TOKENS)
        kv_bytes = whole.manifest.num_layers * whole.manifest.kv_bytes(1, quantization, kv)
        answers.add_row(name, f"{equal} of {ANSWERS}", f"{100 * alike:.1f}%", f"{kv_bytes:,}")
    yield from (chunked, decoded, answers)


def greedy(whole: Whole, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All answers together, as a mesh decodes them."""
    rows = [row for i, prompt in enumerate(prompts) for row in whole.run([whole.work(f"a{i}", 0, prompt, 1)])]
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(ANSWER_TOKENS):
        works = [
            SampleWork(whole.manifest.model_id, row, Sampling(), 0.0) for row in rows if isinstance(row, memoryview)
        ]
        tokens = [choice.token_id for choice in whole.run(works) if isinstance(choice, Choice)]
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
        position = len(prompts[0]) + step
        rows = whole.run([whole.work(f"a{i}", position, [token], 1) for i, token in enumerate(tokens)])
    return answers


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens until they part."""
    differs = torch.tensor(first) != torch.tensor(second)
    return int(differs.int().argmax()) if bool(differs.any()) else len(first)
