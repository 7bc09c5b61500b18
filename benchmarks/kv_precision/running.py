"""SmolLM2 whole in one executor, and running tokens through it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from benchmarks.shard_step import run
from meshnet.chunks import CHUNK_TOKENS
from meshnet.model import KvPrecision, ModelManifest, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import FreeWork, PromptWork, Result, Segment, SessionKey, ShardSpec, Work
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from tests.smollm2 import smollm2_path

MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Whole:
    """All layers of the model."""

    manifest: ModelManifest
    executor: TorchExecutor

    def work(self, session: str, position: int, tokens: Sequence[int], num_returned: int) -> PromptWork:
        layers = self.manifest.all_layers
        segment = Segment(SessionKey(session, MODEL, layers), position, len(tokens), num_returned)
        return PromptWork(MODEL, layers, (segment,), tuple(tokens))

    def run(self, works: Sequence[Work]) -> list[Result]:
        return run(self.executor, works)

    def logits(self, session: str, tokens: Sequence[int], chunk: int = CHUNK_TOKENS, position: int = 0) -> torch.Tensor:
        """`[tokens, vocab]` in float32, of tokens that follow on the first `position` of a session."""
        rows = []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            (result,) = self.run([self.work(session, position + start, part, len(part))])
            assert isinstance(result, memoryview)
            rows.append(torch.frombuffer(bytearray(result), dtype=torch.bfloat16).view(len(part), -1))
        with torch.inference_mode():
            return torch.cat([self.executor.entry(MODEL).logits(part).float() for part in rows])

    def free(self, *sessions: str) -> None:
        self.run([FreeWork(tuple(SessionKey(session, MODEL, self.manifest.all_layers) for session in sessions))])


def load(quantization: Quantization, kv_precision: KvPrecision, kv_tokens: int) -> Whole:
    files = ModelFiles(MODEL, smollm2_path())
    manifest = read_manifest(files)
    executor = TorchExecutor({MODEL: files}, threads=1)
    spec = ShardSpec(manifest, manifest.all_layers, quantization, kv_tokens, kv_precision)
    executor.attach(executor.load(spec, lambda done, total: None))
    return Whole(manifest, executor)


COMPARISONS = ("perplexity", "same greedy token", "KL divergence", "mean and max |logit difference|")


def compare(table: Table, name: str, logits: torch.Tensor, exact: torch.Tensor, tokens: Sequence[int]) -> None:
    """One row, of logits `[tokens, vocab]` against those that they should be."""
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).item()
    share = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
    divergence = torch.nn.functional.kl_div(
        logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    ).item()
    off = (logits - exact).abs()
    sizes = f"{off.mean().item():.4f}, {off.max().item():.2f}"
    table.add_row(name, f"{math.exp(loss):.4f}", f"{100 * share:.2f}%", f"{divergence:.1e}", sizes)
