"""`meshnet token`: makes the file of a mesh's tokens, and changes them without a pause."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshnet.errors import InvalidRequest
from meshnet.security.token_file import MAX_TOKENS, create_file, read_tokens, replace_file
from meshnet.security.tokens import make_token


def token(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="One token a line: the first is sent, all are accepted.")
    ],
    add: Annotated[bool, typer.Option("--add", help="Add a new token, which is accepted and not sent yet.")] = False,
    rotate: Annotated[bool, typer.Option("--rotate", help="Send the newest token from now on.")] = False,
    drop_old: Annotated[bool, typer.Option("--drop-old", help="Accept no token but the one that is sent.")] = False,
) -> None:
    """Make a file with the token of a mesh, or change the token of one.

    To change it, run --add, --rotate and --drop-old one after the other, and copy the file to every machine after each.
    Nobody has to be started again. The tokens themselves are never shown.
    """
    if add + rotate + drop_old > 1:
        raise typer.BadParameter("--add, --rotate and --drop-old are steps: one at a time")
    change = _added if add else _rotated if rotate else _without_old if drop_old else None
    try:
        typer.echo(_changed(file, *change(read_tokens(file))) if change else _made(file))
    except InvalidRequest as error:
        typer.echo(f"meshnet token: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"meshnet token: cannot write {file}: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None


def _made(file: Path) -> str:
    """Making one that is there is no error, so that it can be part of a start."""
    try:
        create_file(file, [make_token()])
    except FileExistsError:
        return (
            f"{file} is there already, with {_counted(read_tokens(file))}. --add, --rotate and --drop-old change them."
        )
    path = shlex.quote(str(file))
    return (
        f"{file} has the token of a new mesh, readable by you alone. Copy it to every machine of the mesh, and start "
        f"everything with --token-file {path} or MESHNET_TOKEN_FILE={path}."
    )


def _changed(file: Path, tokens: Sequence[str], told: str) -> str:
    replace_file(file, tokens)
    return told


def _added(tokens: Sequence[str]) -> tuple[Sequence[str], str]:
    if len(tokens) >= MAX_TOKENS:
        raise InvalidRequest(f"there are {_counted(tokens)} already: --drop-old first")
    return (
        [*tokens, make_token()],
        "A new token is accepted now, and not sent yet. When every machine has this file: --rotate",
    )


def _rotated(tokens: Sequence[str]) -> tuple[Sequence[str], str]:
    if len(tokens) == 1:
        raise InvalidRequest("there is one token, and no newer one to send: --add first")
    return (
        [tokens[-1], *tokens[:-1]],
        "The newest token is sent now, older ones are still accepted. When every machine and client has it: --drop-old",
    )


def _without_old(tokens: Sequence[str]) -> tuple[Sequence[str], str]:
    return tokens[:1], f"One token is left; {len(tokens) - 1} dropped."


def _counted(tokens: Sequence[str]) -> str:
    return f"{len(tokens)} token{'s' if len(tokens) > 1 else ''}"
