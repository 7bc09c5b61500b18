"""`meshnet directives`: what nodes were told to do, why, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshnet.cli.admin_client import admin_client
from meshnet.cli.options import DEFAULT_TRACKER, JsonOption, TrackerOption
from meshnet.cli.output import console, format_age, print_json, table
from meshnet.directive import Directive, DirectiveState
from meshnet.model import KvPrecision
from meshnet.security.options import SecretOption
from meshnet.sizes import format_size

STYLES = {DirectiveState.FAILED: "red", DirectiveState.READY: "green", DirectiveState.DROPPED: "green"}


def directives_table(directives: Iterable[Directive], now: float, *, title: str = "Directives") -> Table:
    """One row a directive, in the given order. `now`: seconds since 1970."""
    made = table(title, "age", "node", "order", "state", "weights", "why")
    for directive in directives:
        issued = directive.issued_unix_seconds
        made.add_row(
            format_age(None if issued is None else now - issued),
            directive.node_id,
            order(directive),
            Text(_state(directive), STYLES.get(directive.state, "yellow")),
            weights(directive),
            Group(directive.reason, Text(directive.failure, "red")) if directive.failure else directive.reason,
        )
    return made


def order(directive: Directive) -> str:
    """`LOAD m 0-10`."""
    return f"{directive.kind.removesuffix('_SHARD')} {directive.model_id} {directive.layers}"


def weights(directive: Directive) -> str:
    size = format_size(directive.bytes_total) if directive.bytes_total else "-"
    return size if directive.kv_precision is KvPrecision.BFLOAT16 else f"{size}, KV at {directive.kv_precision}"


def directives(
    node_id: Annotated[str, typer.Argument(help="A node of the mesh, or one that was. Default: all.")] = "",
    tracker: TrackerOption = DEFAULT_TRACKER,
    secret: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what nodes were told to load and drop, why, and what became of it; the newest last."""
    with admin_client(tracker, secret) as client:
        found = client.directives(node_id)
    if as_json:
        print_json([asdict(directive) for directive in found])
    elif found:
        console.print(directives_table(found, time.time()))
    else:
        console.print(f"No directives{node_id and f' for {node_id}'} so far.")


def _state(directive: Directive) -> str:
    if directive.state is not DirectiveState.LOADING:
        return directive.state
    return f"{directive.state} {100 * directive.bytes_done // max(directive.bytes_total, 1)}%"
