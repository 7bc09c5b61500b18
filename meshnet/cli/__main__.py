"""`python -m meshnet.cli` is `meshnet`."""

from __future__ import annotations

from meshnet.cli.main import app

app(prog_name="meshnet")
