"""Other ways to round keys and values to 8 bits, simulated on float32 shards, and how unequal channels are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.table import Table

from benchmarks.kv_precision.running import COMPARISONS, Whole, compare, load
from meshnet.model import KvPrecision, Quantization
from services.node.engine.kv_rows import KvFormat, KvRows

# Of K or of V, [kv_heads, tokens, head_dim].
Rounding = Callable[[torch.Tensor], torch.Tensor]
TOKENS = 600
OUTLIER_CHANNELS = (5, 40)
OUTLIER_FACTORS = (10, 30, 100)


def rounded(
    rows: torch.Tensor, dims: tuple[int, ...] = (-1,), scale_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """With a scale for what lies along `dims`."""
    scales = (rows.abs().amax(dims, keepdim=True) / 127).clamp_min(1e-30).to(scale_dtype).float()
    return torch.round(rows / scales).clamp(-127, 127) * scales


def in_groups(rows: torch.Tensor, size: int) -> torch.Tensor:
    return rounded(rows.reshape(*rows.shape[:2], -1, size)).view(rows.shape)


def with_outliers(rows: torch.Tensor, factor: float) -> torch.Tensor:
    """As if two channels of each head were so many times as large, and the queries' as much smaller."""
    sizes = torch.ones(rows.shape[-1])
    sizes[list(OUTLIER_CHANNELS)] = factor
    return rounded(rows * sizes) / sizes


def unchanged(rows: torch.Tensor) -> torch.Tensor:
    return rows


# Of keys, of values, and the bytes that scales take of a token and KV head, K and V together.
WAYS: dict[str, tuple[Rounding, Rounding, str]] = {
    "a token and head, bfloat16": (rounded, rounded, "4"),
    "a token and head, float16": (lambda k: rounded(k, scale_dtype=torch.float16),) * 2 + ("4",),
    "a token and head, float32": (lambda k: rounded(k, scale_dtype=torch.float32),) * 2 + ("8",),
    "a token": (lambda k: rounded(k, (0, 2)), lambda v: rounded(v, (0, 2)), "1.3"),
    "32 values, bfloat16": (lambda k: in_groups(k, 32), lambda v: in_groups(v, 32), "8"),
    "keys: a channel of 128 tokens": (lambda k: rounded(k, (1,)), rounded, "3"),
    "keys only": (rounded, unchanged, "2"),
    "values only": (unchanged, rounded, "2"),
}


@contextmanager
def rounding(keys: Rounding, values: Rounding) -> Iterator[None]:
    stored = KvFormat.stored
    KvFormat.stored = lambda self, k, v: KvRows(keys(k), values(v))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        KvFormat.stored = stored  # type: ignore[method-assign]


def rounding_tables(tokens: Sequence[int]) -> Iterator[Table]:
    tokens = tokens[:TOKENS]
    whole = load(Quantization.FLOAT32, KvPrecision.BFLOAT16, len(tokens))
    sizes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def seen(rows: torch.Tensor) -> torch.Tensor:
        found.append(rows.abs().amax(1))
        return rows

    found: list[torch.Tensor] = []
    with rounding(seen, seen):
        exact = whole.logits("text", tokens)
    # Each chunk gives K and V of each layer in turn.
    layers = whole.manifest.num_layers
    for layer in range(layers):
        keys, values = (torch.stack(found[2 * layer + part :: 2 * layers]).amax(0) for part in (0, 1))
        sizes.append((keys, values))
    yield _ways(whole, tokens, exact)
    yield _outliers(whole, tokens, exact)
    yield _channels(sizes)


def _ways(whole: Whole, tokens: Sequence[int], exact: torch.Tensor) -> Table:
    table = Table(title=f"{len(tokens)} tokens, float32 weights, 8-bit keys and values: a scale for ...")
    for column in ("", *COMPARISONS):
        table.add_column(column)
    for name, (keys, values, scale_bytes) in WAYS.items():
        with rounding(keys, values):
            compare(table, f"{name} ({scale_bytes} B)", whole.logits("text", tokens), exact, tokens)
    return table


def _outliers(whole: Whole, tokens: Sequence[int], exact: torch.Tensor) -> Table:
    table = Table(title="The same, if two key channels of each head were so many times as large")
    for column in ("", *COMPARISONS):
        table.add_column(column)
    for factor in OUTLIER_FACTORS:
        with rounding(lambda k, factor=factor: with_outliers(k, factor), rounded):  # type: ignore[misc]
            compare(table, f"x {factor}", whole.logits("text", tokens), exact, tokens)
    return table


def _channels(sizes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Table:
    """Of each head: its largest channel against the median of its channels, by their largest values."""
    table = Table(title="Largest channel of a head / median channel")
    for column in ("", "median head", "worst head"):
        table.add_column(column)
    for name, part in (("keys", 0), ("values", 1)):
        heads = torch.cat([layer[part] for layer in sizes])
        ratios = heads.amax(-1) / heads.median(-1).values
        table.add_row(name, f"{ratios.median().item():.1f}", f"{ratios.max().item():.1f}")
    return table
