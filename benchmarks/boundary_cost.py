"""What the bfloat16 boundary costs nodes that compute in float32.

    python -m benchmarks.boundary_cost

SmolLM2-135M over a fixed text, teacher-forced, against the unsharded float32 model of `transformers`: the unsharded
bfloat16 model, and float32 shards on one, three and thirty nodes, whose hidden states cross each boundary as bfloat16.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from meshnet.model import LayerRange, ModelManifest, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import Buffer, ForwardWork, PromptWork, Segment, SessionKey, ShardSpec
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from tests.parity import Reference
from tests.smollm2 import smollm2_path

TEXT = (Path(__file__).parent / "text.txt").read_text()
MAX_TOKENS = 1000
MODEL = "smollm2-135m"


def sharded_logits(executor: TorchExecutor, manifest: ModelManifest, tokens: list[int], num_nodes: int) -> torch.Tensor:
    """`[tokens, vocab]` in float32, through `num_nodes` equal ranges with a bfloat16 boundary behind each."""
    size = manifest.num_layers // num_nodes
    hidden: Buffer = b""
    for start in range(0, manifest.num_layers, size):
        layers = LayerRange(start, start + size)
        segments = (Segment(SessionKey(f"{num_nodes}", MODEL, layers), 0, len(tokens), len(tokens)),)
        work = (
            ForwardWork(MODEL, layers, segments, hidden)
            if start
            else PromptWork(MODEL, layers, segments, tuple(tokens))
        )
        (result,) = executor.run([work])
        assert isinstance(result, bytes | bytearray | memoryview), result
        hidden = result
    rows = torch.frombuffer(bytearray(hidden), dtype=torch.bfloat16).view(len(tokens), manifest.hidden_size)
    with torch.inference_mode():
        return executor.entry(MODEL).logits(rows).float()


def compare(table: Table, name: str, logits: torch.Tensor, exact: torch.Tensor, tokens: list[int]) -> None:
    """One row: differences to the exact logits, and perplexity of the text."""
    targets = torch.tensor(tokens[1:])
    loss = torch.nn.functional.cross_entropy(logits[:-1], targets).item()
    share = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
    divergence = torch.nn.functional.kl_div(
        logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"
    ).item()
    mean = (logits - exact).abs().mean().item()
    table.add_row(name, f"{mean:.4f}", f"{divergence:.2e}", f"{100 * share:.1f}%", f"{math.exp(loss):.4f}")


def main() -> None:
    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = tokenizer.encode(TEXT)[:MAX_TOKENS]
    reference = Reference(path)
    rounded = reference.logits(tokens).float()
    reference.model.float()
    exact = reference.logits(tokens)
    table = Table(title=f"SmolLM2-135M, {len(tokens)} tokens, against unsharded float32")
    for column in ("", "mean |logit difference|", "KL divergence", "same argmax", "perplexity"):
        table.add_column(column)
    compare(table, "unsharded float32", exact, exact, tokens)
    compare(table, "unsharded bfloat16", rounded, exact, tokens)
    files = ModelFiles(MODEL, path)
    manifest = read_manifest(files)
    executor = TorchExecutor({MODEL: files}, "cpu", 2)
    spec = ShardSpec(manifest, manifest.all_layers, Quantization.FLOAT32, len(tokens))
    executor.attach(executor.load(spec, lambda done, total: None))
    for num_nodes in (1, 3, 30):
        logits = sharded_logits(executor, manifest, tokens, num_nodes)
        compare(table, f"float32 on {num_nodes} node(s)", logits, exact, tokens)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
