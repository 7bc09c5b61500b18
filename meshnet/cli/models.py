"""`meshnet models`: what models would take of a mesh, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshnet.cli.options import JsonOption, KvOption
from meshnet.cli.output import console, print_json, table
from meshnet.inspection import Inspection, fit
from meshnet.model import KvPrecision, ModelManifest, Quantization
from meshnet.sizes import format_size

# Of common graphics cards, in units of 10^9 bytes.
VRAM_GB = (4, 6, 8, 12, 16, 24, 48, 80)

app = typer.Typer(no_args_is_help=True, help="Look at models before they are deployed.")


@app.callback()
def _models() -> None:
    """A command alone would take the place of its group."""


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(help="ID=PATH or PATH of a Hugging Face directory, of a GGUF file or of a config.json alone."),
    ],
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens of KV cache in each layer. Default: the model's context length.", min=1)
    ] = None,
    kv: KvOption = KvPrecision.BFLOAT16,
    as_json: JsonOption = False,
) -> None:
    """Show what a model weighs at each precision and what of it fits on which node. Reads only the files' headers."""
    inspection = read_headers(model, kv_tokens, kv)
    if as_json:
        print_json(asdict(inspection) | {"fits": _all_fits(inspection)})
    else:
        console.print(inspection_picture(inspection))


def read_headers(model: str, kv_tokens: int | None = None, kv: KvPrecision = KvPrecision.BFLOAT16) -> Inspection:
    """From the service that knows weight files; it says itself what is wrong with them. Raises typer.Exit."""
    arguments = ["--kv", kv.value, *(["--kv-tokens", str(kv_tokens)] if kv_tokens else [])]
    command = [sys.executable, "-m", "services.node.inspecting", *arguments, "--", model]
    outcome = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False)
    if outcome.returncode:
        raise typer.Exit(outcome.returncode)
    return Inspection.from_json(outcome.stdout)


def _all_fits(inspection: Inspection) -> list[dict[str, Any]]:
    """`shards` is null where a part of the model fits on no node of that size."""
    found = [(size * 10**9, quantization) for size in VRAM_GB for quantization in Quantization]
    return [
        {
            "vram_bytes": vram_bytes,
            "quantization": quantization.value,
            "shards": shards and [asdict(layers) for layers in shards],
        }
        for vram_bytes, quantization in found
        for shards in (fit(inspection, quantization, vram_bytes),)
    ]


def inspection_picture(inspection: Inspection) -> RenderableType:
    return Group(_facts(inspection), "", _sizes(inspection), "", _fits(inspection))


def _facts(inspection: Inspection) -> Table:
    manifest = inspection.manifest
    facts = table(manifest.model_id, "", "")
    facts.show_header = False
    for name, value in (
        ("architecture", manifest.architecture),
        ("revision", manifest.revision[:12]),
        ("layers", f"{manifest.num_layers}"),
        ("hidden size", f"{manifest.hidden_size:,}"),
        ("vocabulary", f"{manifest.vocab_size:,} tokens"),
        ("context", f"{manifest.context_length:,} tokens"),
        ("KV cache", f"for {inspection.kv_tokens:,} tokens in each layer, stored at {inspection.kv_precision}"),
        ("KV a token", _kv_a_token(manifest)),
    ):
        facts.add_row(name, value)
    return facts


def _kv_a_token(manifest: ModelManifest) -> str:
    sizes = ((kv, manifest.num_layers * manifest.kv_bytes(1, Quantization.BFLOAT16, kv)) for kv in KvPrecision)
    return ", ".join(f"{format_size(size)} at {kv}" for kv, size in sizes) + ", in all layers together"


def _sizes(inspection: Inspection) -> Table:
    manifest = inspection.manifest
    sizes = table("Bytes", "precision", "a layer", "entry part", "all weights", "KV a token", "KV in all", "workspace")
    for quantization in Quantization:
        layer_bytes = [layer.at(quantization) for layer in manifest.layers]
        sizes.add_row(
            quantization.value,
            _spread(layer_bytes),
            format_size(manifest.entry.at(quantization)),
            format_size(manifest.weight_bytes(manifest.all_layers, quantization)),
            format_size(manifest.num_layers * manifest.kv_bytes(1, quantization, inspection.kv_precision)),
            format_size(manifest.num_layers * inspection.kv_bytes(quantization)),
            format_size(inspection.entry_workspace.at(quantization)),
        )
    sizes.caption = Text(
        "entry part: embedding, final norm and LM head; KV: in all layers together; workspace: of an entry node's "
        "steps, at most",
        "dim",
        justify="left",
    )
    return sizes


def _fits(inspection: Inspection) -> Table:
    made = table("What fits: layers on the entry node / on the next, and nodes for all", "each lends")
    for quantization in Quantization:
        made.add_column(quantization.value, overflow="fold")
    for size in VRAM_GB:
        made.add_row(f"{size} GB", *(_fit(inspection, quantization, size * 10**9) for quantization in Quantization))
    made.caption = Text(
        f"with KV cache for {inspection.kv_tokens:,} tokens and workspace; -: a part of the model fits on no such node",
        "dim",
        justify="left",
    )
    return made


def _spread(sizes: Sequence[int]) -> str:
    """One size, or the smallest, the mean and the largest."""
    if min(sizes) == max(sizes):
        return format_size(sizes[0])
    return " / ".join(map(format_size, (min(sizes), sum(sizes) // len(sizes), max(sizes))))


def _fit(inspection: Inspection, quantization: Quantization, vram_bytes: int) -> str:
    shards = fit(inspection, quantization, vram_bytes)
    if shards is None:
        return "-"
    if len(shards) == 1:
        return "all, 1 node"
    return f"{len(shards[0])} / {len(shards[1])}, {len(shards)} nodes"
