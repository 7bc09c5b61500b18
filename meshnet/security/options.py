"""Options of commands and services that have to do with the secret."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshnet.errors import InvalidRequest
from meshnet.security.shared_secret import SharedSecret

TOKEN_FILE = "--token-file"  # noqa: S105 (the name of an option)


def _open(path: str) -> SharedSecret:
    """Ends the command with one line if the file is not in order."""
    try:
        return SharedSecret(Path(path))
    except InvalidRequest as error:
        typer.echo(f"meshnet: {error}", err=True)
        raise typer.Exit(1) from None


SecretOption = Annotated[
    SharedSecret | None,
    typer.Option(
        TOKEN_FILE,
        parser=_open,
        metavar="FILE",
        help="File with the mesh's tokens (`meshnet token` makes it): the first is sent, all are accepted.",
        envvar="MESHNET_TOKEN_FILE",
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen where other machines can reach it without a token: whoever can, may do anything.",
        envvar="MESHNET_INSECURE",
    ),
]
