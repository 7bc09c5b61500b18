"""`python -m services.tracker`: the control plane of a mesh."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from meshnet.addresses import join_address, split_address
from meshnet.errors import InvalidRequest
from meshnet.model import KvPrecision
from meshnet.security.options import InsecureOption, SecretOption
from meshnet.security.startup import check_listens
from meshnet.service import configure_logging, run_process, run_until_stopped
from services.tracker.app import CannotListen, serve
from services.tracker.config import Config
from services.tracker.store import StoreFailed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DEFAULT_PORT = 7700


@app.command()
def main(
    listen: Annotated[
        str, typer.Option(envvar="MESHNET_TRACKER_LISTEN", help="HOST:PORT to listen on; port 0 takes a free one.")
    ] = "127.0.0.1:7700",
    deploy: Annotated[
        list[str] | None,
        typer.Option(envvar="MESHNET_DEPLOY", help="Model to serve as soon as a node has its files; repeatable."),
    ] = None,
    kv_tokens: Annotated[
        int,
        typer.Option(
            envvar="MESHNET_KV_TOKENS",
            help="KV cache room, in tokens, on every shard of the models of --deploy; 0: the context length.",
        ),
    ] = 0,
    kv: Annotated[
        KvPrecision,
        typer.Option(
            envvar="MESHNET_KV", help="How KV caches of the models of --deploy are stored; int8 is about half."
        ),
    ] = KvPrecision.BFLOAT16,
    lease: Annotated[
        float, typer.Option(envvar="MESHNET_LEASE", help="Seconds of silence after which a node is lost.")
    ] = 15.0,
    heartbeat: Annotated[
        float, typer.Option(envvar="MESHNET_HEARTBEAT", help="Seconds between the heartbeats of a node.")
    ] = 3.0,
    suspect: Annotated[
        float | None,
        typer.Option(
            envvar="MESHNET_SUSPECT",
            help="Seconds of silence after which routes avoid a node. Default: two and a half heartbeats.",
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            envvar="MESHNET_TRACKER_STATE",
            help="File that keeps deployed models and who holds what across restarts. Default: nothing is kept.",
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(envvar="MESHNET_LOG_LEVEL", help="debug, info, warning or error.")] = "info",
    secret: SecretOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Knows who is in the mesh and who holds what, and decides who should hold what."""
    try:
        configure_logging(log_level)
        host, port = split_address(listen, DEFAULT_PORT)
        check_listens({"--listen": join_address(host, port)}, secret, insecure=insecure)
        config = Config(host, port, tuple(deploy or ()), kv_tokens, lease, heartbeat, suspect, state, kv, secret)
        asyncio.run(run_until_stopped(serve(config, _say_listening)))
    except (InvalidRequest, CannotListen, StoreFailed) as error:
        typer.echo(f"meshnet tracker: {error}", err=True)
        raise typer.Exit(1) from error


def _say_listening(address: str) -> None:
    typer.echo(f"meshnet tracker listening on {address}")


if __name__ == "__main__":
    run_process(lambda: app(prog_name="meshnet tracker"))
