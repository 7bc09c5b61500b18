"""The command line of the gateway process, and its life from the first signal to the last."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from meshnet.addresses import join_address, split_address
from meshnet.errors import InvalidRequest
from meshnet.model_files import locate_models
from meshnet.security.options import InsecureOption, SecretOption
from meshnet.security.startup import check_listens
from meshnet.service import configure_logging, exit_with_parent
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.gateway.mesh_client import MeshClient
from services.gateway.server import BACKLOG, serve
from services.gateway.service import Service
from services.gateway.tokenizers_store import TokenizerStore

app = typer.Typer(add_completion=False)


@app.command()
def main(
    tracker: Annotated[
        str, typer.Option(help="Address of the tracker, HOST:PORT.", envvar="MESHNET_TRACKER")
    ] = "127.0.0.1:7700",
    listen: Annotated[
        str, typer.Option(help="Address to serve HTTP on, HOST:PORT.", envvar="MESHNET_GATEWAY_LISTEN")
    ] = "127.0.0.1:8000",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Tokenizer files of a model, ID=PATH or PATH: a directory, a GGUF file or hf:ORG/NAME. Repeatable."
        ),
    ] = None,
    models: Annotated[
        Path | None, typer.Option(help="Folder of models, each a directory or a GGUF file.", envvar="MESHNET_MODELS")
    ] = None,
    log_level: Annotated[str, typer.Option(help="Level of the log.", envvar="MESHNET_LOG_LEVEL")] = "info",
    request_timeout: Annotated[
        float, typer.Option(help="Longest generation, in seconds.", envvar="MESHNET_REQUEST_TIMEOUT", min=0.1)
    ] = 600.0,
    resume_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds within which a stream whose entry node failed must go on at another.",
            envvar="MESHNET_RESUME_TIMEOUT",
            min=0.0,
        ),
    ] = 60.0,
    write_timeout: Annotated[
        float,
        typer.Option(
            help="Longest time a client may leave data unread, in seconds.", envvar="MESHNET_WRITE_TIMEOUT", min=0.1
        ),
    ] = 60.0,
    stream_silence: Annotated[
        float,
        typer.Option(
            help="Silence on a stream, in seconds, after which a comment keeps it alive.",
            envvar="MESHNET_STREAM_SILENCE",
            min=0.1,
        ),
    ] = 15.0,
    secret: SecretOption = None,
    insecure: InsecureOption = False,
) -> None:
    """The REST front of a mesh: the OpenAI API, tokenization and streaming."""
    try:
        configure_logging(log_level)
        host, port = split_address(listen)
        split_address(tracker)
        check_listens({"--listen": listen}, secret, insecure=insecure)
        files = locate_models(model or (), models)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
    config = GatewayConfig(
        tracker, host, port, files, request_timeout, resume_timeout, write_timeout, stream_silence, secret=secret
    )
    listener = _listen(host, port)
    asyncio.run(run(config, listener))
    # Without waiting for the threads: one may be in the middle of loading a tokenizer.
    logging.shutdown()
    os._exit(0)


async def run(config: GatewayConfig, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    exit_with_parent()
    mesh = MeshClient(config.tracker, config.request_timeout, config.resume_timeout, config.secret)
    tokenizers = TokenizerStore(config.models)
    watching = asyncio.create_task(mesh.watch_topology())
    minding = asyncio.create_task(mesh.entry_watch.run())
    try:
        quart = create_app(Service(mesh, tokenizers), config, int(time.time()))
        # Connections wait in the backlog of the socket, which listens already.
        host, port = listener.getsockname()[:2]
        print(f"meshnet gateway listening on http://{join_address(host, port)}", flush=True)
        await serve(quart, listener, config, stop)
    finally:
        for task in (watching, minding):
            task.cancel()
        await asyncio.gather(watching, minding, return_exceptions=True)
        tokenizers.close()
        await mesh.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        typer.echo(f"meshnet gateway: cannot listen on {join_address(host, port)}: {error.strerror or error}", err=True)
        raise typer.Exit(1) from error
