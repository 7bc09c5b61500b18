"""How fast a shard is on a CUDA device, beside transformers on the same device.

    python -m benchmarks.cuda_shard

SmolLM2-135M whole, as one shard and in transformers (with bitsandbytes at int8 and nf4): tokens/s of a prompt in chunks
of 128 tokens and of one, and of decoding for one session and for 16 at once. Medians, with the choice of a token and
the copies to and from the device: what a node does. `--device cpu` tries the same code without a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import StaticCache

from meshnet.chunks import CHUNK_TOKENS
from meshnet.model import Quantization
from meshnet.model_files import ModelFiles
from services.node.engine.device import machine_name
from tests.oracle import dtype_of, unsharded
from tests.parity import Reference
from tests.services.node.engine.models import MODEL, Mesh, mesh
from tests.smollm2 import smollm2_path

VOCAB = 49152


def median_seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    """Of a step, everything that it began on the device included. The first two are not counted: they compile."""
    times = []
    for _ in range(repeats + 2):
        _finish(device)
        started = time.perf_counter()
        step()
        _finish(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def _finish(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(VOCAB, (count,), generator=generator)]


def of_shard(shards: Mesh, prompt: int, sessions: Sequence[int], device: str, repeats: int) -> Iterator[float]:
    """Tokens/s: of a prompt in chunks, of the same in one chunk, and of decoding for so many sessions at once."""
    tokens = tokens_of(prompt)

    def prefill(chunk: int) -> None:
        for start in range(0, prompt, chunk):
            rows = shards.step({"prompt": tokens[start : start + chunk]}, {"prompt": start})
        shards.sample(rows)

    for chunk in (CHUNK_TOKENS, prompt):
        yield prompt / median_seconds(lambda chunk=chunk: prefill(chunk), device, repeats)  # type: ignore[misc]
    shards.free("prompt")
    for count in sessions:
        names = [f"s{index}" for index in range(count)]
        for index, name in enumerate(names):
            shards.step({name: tokens_of(prompt, index)}, {name: 0})
        at = dict.fromkeys(names, prompt)
        seconds = median_seconds(lambda at=at: shards.sample(shards.step({n: [7] for n in at}, at)), device, repeats)  # type: ignore[misc]
        yield count / seconds
        shards.free(*names)


@torch.inference_mode()
def of_transformers(model: Any, prompt: int, sessions: Sequence[int], device: str, repeats: int) -> Iterator[float]:
    """The same, the sessions as the rows of a batch."""
    rows = torch.tensor([tokens_of(prompt)], device=device)

    def run(ids: torch.Tensor, cache: Any, start: int) -> list[int]:
        positions = torch.arange(start, start + ids.shape[1], device=device)[None].expand(len(ids), -1)
        # Positionally it has one name in all versions.
        logits = model(ids, None, positions, cache, use_cache=True, logits_to_keep=1).logits
        return list(logits[:, -1].argmax(-1).tolist())

    def prefill(chunk: int) -> None:
        cache = _cache(model, 1, prompt)
        for start in range(0, prompt, chunk):
            run(rows[:, start : start + chunk], cache, start)

    for chunk in (CHUNK_TOKENS, prompt):
        yield prompt / median_seconds(lambda chunk=chunk: prefill(chunk), device, repeats)  # type: ignore[misc]
    for count in sessions:
        cache = _cache(model, count, prompt + repeats + 3)
        run(torch.tensor([tokens_of(prompt, index) for index in range(count)], device=device), cache, 0)
        ids, ends = torch.full((count, 1), 7, device=device), iter(range(prompt, prompt + repeats + 3))
        seconds = median_seconds(lambda ids=ids, cache=cache, ends=ends: run(ids, cache, next(ends)), device, repeats)  # type: ignore[misc]
        yield count / seconds


def _cache(model: Any, rows: int, tokens: int) -> Any:
    return StaticCache(config=model.config, max_cache_len=tokens, max_batch_size=rows)


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")] = "cuda",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, and cached before each decode.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    sessions: Annotated[list[int] | None, typer.Option(help="Decoded at once; may be given again.")] = None,
) -> None:
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"There is no CUDA device for this torch ({torch.__version__}); --device cpu tries the code without one."
        )
    counts = sessions or [1, 16]
    path = smollm2_path()
    files, float32 = ModelFiles(MODEL, path), Reference(path, torch.float32)
    table = Table(title=f"SmolLM2-135M behind {prompt} tokens, tokens/s, {machine_name(torch.device(device))}")
    columns = [f"prefill by {CHUNK_TOKENS}", "prefill at once", *(f"decode, {count} sessions" for count in counts)]
    for column in ("precision", "", *columns):
        table.add_column(column, justify="right" if column in columns else "left")
    for quantization in Quantization:
        model = unsharded(float32, quantization, device).model
        assert model.dtype == dtype_of(quantization)
        theirs = list(of_transformers(model, prompt, counts, device, repeats))
        del model
        with mesh(files, None, quantization, device, (max(counts) + 1) * (prompt + CHUNK_TOKENS)) as shards:
            ours = list(of_shard(shards, prompt, counts, device, repeats))
        for name, rates in (("transformers", theirs), ("shard", ours)):
            table.add_row(str(quantization), name, *(f"{rate:,.0f}" for rate in rates))
        table.add_section()
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
