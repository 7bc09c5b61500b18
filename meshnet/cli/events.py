"""`meshnet events`: what happens in the mesh."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from meshnet.admin import Event, EventLevel
from meshnet.cli.admin_client import admin_client
from meshnet.cli.options import DEFAULT_TRACKER, TrackerOption
from meshnet.cli.output import console, print_json
from meshnet.security.options import SecretOption

STYLES = {EventLevel.INFO: "", EventLevel.WARNING: "yellow"}


def events(
    past: Annotated[int, typer.Option(help="Also the newest events before now, at most this many.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for what happens next.")] = True,
    tracker: TrackerOption = DEFAULT_TRACKER,
    secret: SecretOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
) -> None:
    """Show what happens in the mesh: nodes, models, directives, coverage. Ctrl-C ends it."""
    with contextlib.suppress(KeyboardInterrupt), admin_client(tracker, secret) as client:
        happened = client.events(past, past_only=not follow)
        if as_json:
            for event in happened:
                print_json(asdict(event), one_line=True)
        else:
            for line in event_lines(happened):
                console.print(line, soft_wrap=True)
        if follow:
            typer.echo(f"the tracker at {tracker} has stopped", err=True)
            raise typer.Exit(1)


def event_lines(events: Iterator[Event]) -> Iterator[Text]:
    """One line an event, and one for each gap."""
    seen: int | None = None
    for event in events:
        if seen is not None and event.number > seen + 1:
            yield Text(f"{event.number - seen - 1} events are missing: they came too fast", "dim")
        seen = event.number
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.unix_seconds))
        yield Text.assemble((when, "dim"), f"  {event.level:<7}  ", event.text, style=STYLES[event.level])
