"""A tracker of nodes that do not exist, for as long as it takes to ask it something."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from meshnet.cli.processes import Processes, ProcessFailed

START_SECONDS = 60.0
# Nobody sends heartbeats.
LEASE_SECONDS, HEARTBEAT_SECONDS = 3600, 1200


@contextmanager
def scratch_tracker() -> Iterator[str]:
    """Starts one on loopback, yields its address and ends it. It is the tracker that a mesh would have, so what it
    plans is what it would plan there."""
    with tempfile.TemporaryDirectory(prefix="meshnet-estimate-") as folder:
        processes = Processes(Path(folder))
        timing = ["--lease", str(LEASE_SECONDS), "--heartbeat", str(HEARTBEAT_SECONDS)]
        tracker = processes.start("tracker", "services.tracker", ["--listen", "127.0.0.1:0", *timing])
        try:
            yield processes.wait_ready(tracker, r"listening on (\S+)", START_SECONDS)[1]
        except ProcessFailed as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        finally:
            processes.stop()
