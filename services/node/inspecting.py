"""`meshnet models inspect`: what the headers of weight files say, as JSON. Without torch, but for a config alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from meshnet.errors import InvalidRequest, MeshnetError
from meshnet.inspection import Inspection
from meshnet.model import KvPrecision, ModelManifest
from meshnet.model_files import CONFIG_FILE, HubModel, ModelFiles, locate_models
from services.node.core.workspace import workspace_at_each_precision
from services.node.files.manifest import read_manifest
from services.node.speed_cache import default_cache_dir

app = typer.Typer(add_completion=False)

CONFIG_SUFFIX = ".json"


@app.command()
def main(
    model: Annotated[
        str,
        typer.Argument(
            help="ID=PATH or PATH of a Hugging Face directory, of a GGUF file or of a config.json alone; hf:ORG/NAME."
        ),
    ],
    kv_tokens: Annotated[int | None, typer.Option(help="Default: the model's context length.", min=1)] = None,
    kv: Annotated[KvPrecision, typer.Option(help="How KV caches are stored.")] = KvPrecision.BFLOAT16,
) -> None:
    """Prints a model's Inspection as JSON, or says on standard error why the model cannot be served."""
    try:
        manifest = _manifest(model)
        typer.echo(inspect(manifest, kv_tokens or manifest.context_length, kv).to_json())
    except (MeshnetError, OSError) as error:
        kind = "" if isinstance(error, InvalidRequest) else f"model {model!r} cannot be served: "
        typer.echo(f"meshnet models inspect: {kind}{error}", err=True)
        raise typer.Exit(1) from None


def _manifest(model: str) -> ModelManifest:
    name, _, path = model.rpartition("=")
    if path.endswith(CONFIG_SUFFIX):
        # Torch and transformers take a moment to import.
        from services.node.describing import describe_config

        return describe_config(name or _name_of(Path(path)), Path(path))
    (files,) = locate_models([model]).values()
    return read_manifest(files) if isinstance(files, ModelFiles) else _hub_manifest(files)


def _name_of(config: Path) -> str:
    """That of its folder, if the file itself is called as all are."""
    stem = config.stem if config.name != CONFIG_FILE else config.absolute().parent.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lower()


def _hub_manifest(model: HubModel) -> ModelManifest:
    # The hub's library takes a moment to import.
    from services.node.fetching.hub_models import open_hub_model

    return open_hub_model(default_cache_dir() / "weights" / "inspected", model).manifest


def inspect(manifest: ModelManifest, kv_tokens: int, kv_precision: KvPrecision = KvPrecision.BFLOAT16) -> Inspection:
    """With the workspace that a node predicts where there is so much room."""

    inner, entry = (workspace_at_each_precision(manifest, kv_tokens, entry=is_entry) for is_entry in (False, True))
    return Inspection(manifest, kv_tokens, inner, entry, kv_precision)


if __name__ == "__main__":
    app(prog_name="meshnet models inspect")
