"""What options of the command line mean."""

from __future__ import annotations

from pathlib import Path

import typer

from meshnet.errors import InvalidRequest
from meshnet.model import parse_quantizations
from meshnet.model_files import locate_models


def model_ids(model: list[str] | None, models: Path | None) -> tuple[str, ...]:
    """Of the models that `--model` and `--models` name. Raises BadParameter if there are none."""
    try:
        found = locate_models(model or (), models)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None
    if not found:
        raise typer.BadParameter(
            "name a model: --model PATH of a Hugging Face directory or a GGUF file, or --models DIR"
        )
    return tuple(found)


def quantization_names(text: str) -> str:
    """As a node takes them, checked. Raises BadParameter."""
    try:
        return ",".join(parse_quantizations(text))
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None


def one_each(text: str | None, count: int, option: str) -> list[str | None]:
    """A value for each of `count` nodes, from one for all or one a node with commas. Raises BadParameter."""
    values: list[str | None] = [part.strip() or None for part in (text or "").split(",")]
    if len(values) not in (1, count):
        raise typer.BadParameter(f"{option} has {len(values)} values for {count} nodes: give one, or one a node")
    return values if len(values) == count else values * count
