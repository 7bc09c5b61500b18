"""How commands print: tables and numbers for people, JSON for programs."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

console = Console(highlight=False)

_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


def print_json(value: Any, *, one_line: bool = False) -> None:
    """Plain values, with sets as sorted lists."""
    typer.echo(json.dumps(value, indent=None if one_line else 2, default=sorted))


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def format_age(seconds: float | None) -> str:
    """`90 min` and the like; a dash if it is not known."""
    if seconds is None:
        return "-"
    for size, unit in _AGES:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
