"""`meshnet plan` and `meshnet rebalance`: what the tracker would order, and ordering it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshnet.admin import DeployWish, PlanPreview
from meshnet.cli.admin_client import admin_client
from meshnet.cli.directives import directives_table, weights
from meshnet.cli.options import (
    DEFAULT_TRACKER,
    ContextOption,
    JsonOption,
    KvOption,
    KvTokensOption,
    PriorityOption,
    ReplicasOption,
    SessionsOption,
    TrackerOption,
)
from meshnet.cli.output import console, print_json, table
from meshnet.directive import Directive, DirectiveKind
from meshnet.model import KvPrecision
from meshnet.security.options import SecretOption

NOTHING = "nothing to do"


def plan(
    without: Annotated[list[str] | None, typer.Option(help="As if this node was gone. Repeatable.")] = None,
    deploy: Annotated[str | None, typer.Option(help="As if this model was deployed.", metavar="MODEL_ID")] = None,
    rebalance: Annotated[bool, typer.Option("--rebalance", help="As `meshnet rebalance` would.")] = False,
    kv_tokens: KvTokensOption = None,
    kv: KvOption = KvPrecision.BFLOAT16,
    priority: PriorityOption = 0,
    context: ContextOption = None,
    sessions: SessionsOption = None,
    replicas: ReplicasOption = None,
    tracker: TrackerOption = DEFAULT_TRACKER,
    secret: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the tracker would order, and why. Changes nothing.

    The last options are those of `meshnet deploy`, and go with --deploy.
    """
    if deploy is None and any((kv_tokens, priority, context, sessions, replicas, kv is not KvPrecision.BFLOAT16)):
        raise typer.BadParameter("name the model that this is for: --deploy MODEL_ID")
    numbers = kv_tokens or 0, priority, context or 0, sessions or 0, replicas or 0
    wish = DeployWish(deploy, *numbers, kv) if deploy else None
    with admin_client(tracker, secret) as client:
        preview = client.plan(without or (), wish, rebalance=rebalance)
    if as_json:
        print_json(asdict(preview))
    else:
        console.print(plan_picture(preview))


def rebalance(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    tracker: TrackerOption = DEFAULT_TRACKER,
    secret: SecretOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move replicas from layers that have many to layers that have few. Shows what it would do, and asks."""
    if as_json and not yes:
        raise typer.BadParameter("--json asks nobody: add --yes, or look first with `meshnet plan --rebalance --json`")
    with admin_client(tracker, secret) as client:
        if not yes:
            preview = client.plan(rebalance=True)
            console.print(plan_picture(preview))
            if not preview.directives:
                return
            typer.confirm("Order this?", abort=True)
        issued = client.rebalance()
    if as_json:
        print_json([asdict(directive) for directive in issued])
    elif issued:
        console.print(directives_table(issued, time.time(), title="Ordered"))
    else:
        console.print(NOTHING)


def plan_picture(preview: PlanPreview) -> RenderableType:
    parts: list[RenderableType] = [_table(preview.directives) if preview.directives else NOTHING]
    parts += [Text(shortfall, "red") for shortfall in preview.shortfalls]
    return Group(*parts)


def _table(directives: Iterable[Directive]) -> Table:
    made = table("", "node", "order", "model", "layers", "weights", "why")
    for directive in directives:
        is_load = directive.kind is DirectiveKind.LOAD_SHARD
        made.add_row(
            directive.node_id,
            Text(directive.kind.removesuffix("_SHARD"), "green" if is_load else "yellow"),
            directive.model_id,
            str(directive.layers),
            weights(directive),
            directive.reason,
        )
    return made
