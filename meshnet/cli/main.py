"""`meshnet`: the command line. It starts services as processes and talks to them over their wires."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshnet import __version__
from meshnet.addresses import join_address
from meshnet.admin import DeployWish
from meshnet.cli.admin_client import admin_client
from meshnet.cli.arguments import model_ids, one_each, quantization_names
from meshnet.cli.chat import run_chat
from meshnet.cli.chat_client import Answering, ChatFailed, first_model
from meshnet.cli.coverage_picture import coverage_picture
from meshnet.cli.describe import describe
from meshnet.cli.directives import directives
from meshnet.cli.estimate import estimate_command
from meshnet.cli.events import events
from meshnet.cli.launch import MeshPlan, NodePlan
from meshnet.cli.models import app as models_app
from meshnet.cli.node_tables import measures_table, nodes_table
from meshnet.cli.options import (
    ContextOption,
    KvOption,
    KvTokensOption,
    PriorityOption,
    ReplicasOption,
    SessionsOption,
    TrackerOption,
)
from meshnet.cli.plans import plan, rebalance
from meshnet.cli.run import run_mesh
from meshnet.cli.status_json import status_json
from meshnet.cli.token import token
from meshnet.model import KvPrecision, Quantization
from meshnet.security.options import InsecureOption, SecretOption
from meshnet.speculate import Speculate

app = typer.Typer(
    no_args_is_help=True,
    help="One large language model, served from many ordinary machines.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=False, highlight=False)

ModelOption = Annotated[
    list[str] | None,
    typer.Option(help="Weight files: ID=PATH or PATH of a Hugging Face directory or a GGUF file. Repeatable."),
]
ModelsOption = Annotated[Path | None, typer.Option(help="Folder whose entries are models.", envvar="MESHNET_MODELS")]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads for each node's layers.", min=1)]
AskOption = Annotated[str | None, typer.Option(help="A question to put to the model once it is served.")]

SpeculateOption = Annotated[
    Speculate,
    typer.Option(
        help="Guess tokens from what was said before, where that has proved faster.", envvar="MESHNET_SPECULATE"
    ),
]
LogLevelOption = Annotated[str, typer.Option(help="debug, info, warning or error.")]
LogOption = Annotated[bool, typer.Option("--log-to-terminal", help="Log here instead of to files.")]

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshnet {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Options of `meshnet` itself."""


def _become(service: str, arguments: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", f"services.{service}", *arguments])  # noqa: S606 (no shell is wanted)


@app.command(
    context_settings=PASS_ON, help="Run a node: lends this machine's memory to a mesh. --help lists its options."
)
def node(context: typer.Context) -> None:
    _become("node", context.args)


@app.command(context_settings=PASS_ON, help="Run a tracker alone. --help lists its options.")
def tracker(context: typer.Context) -> None:
    _become("tracker", context.args)


@app.command(context_settings=PASS_ON, help="Run a gateway (OpenAI-compatible REST). --help lists its options.")
def gateway(context: typer.Context) -> None:
    _become("gateway", context.args)


@app.command()
def up(
    model: ModelOption = None,
    models: ModelsOption = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes to start, the tracker-node's own among them.", min=1)] = 3,
    vram: Annotated[
        str | None,
        typer.Option(help="Memory each node lends: one size for all, or one a node, such as 260MB,200MB,200MB."),
    ] = None,
    quantization: Annotated[
        str,
        typer.Option(
            help="bfloat16, int8, nf4 or float32: one for all nodes, or one a node, with commas. bfloat16+int8 prefers "
            "the first and takes the second where that does not fit."
        ),
    ] = Quantization.BFLOAT16.value,
    threads: ThreadsOption = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    kv_tokens: KvTokensOption = None,
    kv: KvOption = KvPrecision.BFLOAT16,
    gateway_listen: Annotated[str, typer.Option(help="Address of the gateway, HOST:PORT.")] = "127.0.0.1:8000",
    tracker_listen: Annotated[str, typer.Option(help="Address of the tracker, HOST:PORT.")] = "127.0.0.1:7700",
    stub: Annotated[bool, typer.Option("--stub", help="Nodes without weights that answer zeros.")] = False,
    ask: AskOption = None,
    log_level: LogLevelOption = "info",
    log_to_terminal: LogOption = False,
    secret: SecretOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Start a whole mesh on this machine: tracker, nodes and gateway. Ctrl-C ends it all."""
    vrams = one_each(vram, nodes, "--vram")
    quantizations = [
        quantization_names(text or quantization) for text in one_each(quantization, nodes, "--quantization")
    ]
    plan = MeshPlan(
        tracker_listen=tracker_listen,
        gateway_listen=gateway_listen,
        nodes=tuple(
            NodePlan(
                node_id=f"node-{index}",
                listen="127.0.0.1:0",
                vram=vrams[index],
                quantization=quantizations[index],
                threads=threads,
                device=device,
                tracker_node=index == 0,
                stub=stub,
            )
            for index in range(nodes)
        ),
        models=tuple(model or ()),
        models_dir=models,
        deploy=model_ids(model, models),
        kv_tokens=kv_tokens,
        kv_precision=kv,
        log_level=log_level,
        log_to_terminal=log_to_terminal,
        secret=secret,
        insecure=insecure,
    )
    run_mesh(plan, ask, console)


@app.command(name="tracker-node")
def tracker_node(
    model: ModelOption = None,
    models: ModelsOption = None,
    listen: Annotated[
        str, typer.Option(help="Host to listen at. Other machines need 0.0.0.0 or an address of this one.")
    ] = "127.0.0.1",
    advertise: Annotated[
        str | None, typer.Option(help="Host name or address by which others reach this machine.")
    ] = None,
    tracker_port: Annotated[int, typer.Option(help="Port of the tracker (gRPC).")] = 7700,
    node_port: Annotated[int, typer.Option(help="Port of the node (HTTP); the next one is its gRPC.")] = 7710,
    gateway_port: Annotated[int, typer.Option(help="Port of the gateway (HTTP).")] = 8000,
    node_id: Annotated[str, typer.Option(help="Name of this machine's node.")] = "tracker-node",
    vram: Annotated[
        str | None, typer.Option(help="Memory to lend, such as 8GiB. Default: half of what is free.")
    ] = None,
    quantization: Annotated[
        str, typer.Option(help="How to store weights. Several, with commas: the first is preferred.")
    ] = Quantization.BFLOAT16.value,
    site: Annotated[str | None, typer.Option(help="What may fail as one. Default: the host name.")] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for measured speeds. Default: meshnet in the user's cache folder.")
    ] = None,
    threads: ThreadsOption = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    kv_tokens: KvTokensOption = None,
    kv: KvOption = KvPrecision.BFLOAT16,
    speculate: SpeculateOption = Speculate.AUTO,
    state: Annotated[
        Path | None,
        typer.Option(help="File in which the tracker keeps what is deployed. Default: none."),
    ] = None,
    ask: AskOption = None,
    log_level: LogLevelOption = "info",
    log_to_terminal: LogOption = False,
    secret: SecretOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Run tracker, gateway and the node of the first layers here. Other machines join with `meshnet node`."""
    own = NodePlan(
        node_id=node_id,
        listen=join_address(listen, node_port),
        vram=vram,
        quantization=quantization_names(quantization),
        threads=threads,
        device=device,
        tracker_node=True,
        site=site,
        cache_dir=cache_dir,
        speculate=speculate,
    )
    plan = MeshPlan(
        tracker_listen=join_address(listen, tracker_port),
        gateway_listen=join_address(listen, gateway_port),
        nodes=(own,),
        models=tuple(model or ()),
        models_dir=models,
        deploy=model_ids(model, models),
        kv_tokens=kv_tokens,
        kv_precision=kv,
        advertise=advertise,
        state=state,
        waits_for_others=True,
        log_level=log_level,
        log_to_terminal=log_to_terminal,
        secret=secret,
        insecure=insecure,
    )
    run_mesh(plan, ask, console)


@app.command()
def status(
    tracker: TrackerOption = "127.0.0.1:7700",
    secret: SecretOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON, for programs.")] = False,
) -> None:
    """Show the nodes, what is measured of them, the coverage map and which routes are ready."""
    with admin_client(tracker, secret) as client:
        topology, shortfalls, routes = client.topology(), client.shortfalls(), client.routes()
    if as_json:
        typer.echo(status_json(topology, shortfalls, routes))
        return
    for table in (nodes_table(topology), measures_table(topology)):
        console.print(table)
        console.print()
    console.print(coverage_picture(topology, shortfalls, routes))


@app.command()
def deploy(
    model_id: Annotated[str, typer.Argument(help="A model that at least one node has the files of.")],
    tracker: TrackerOption = "127.0.0.1:7700",
    secret: SecretOption = None,
    kv_tokens: KvTokensOption = None,
    kv: KvOption = KvPrecision.BFLOAT16,
    priority: PriorityOption = 0,
    context: ContextOption = None,
    sessions: SessionsOption = None,
    replicas: ReplicasOption = None,
) -> None:
    """Ask the mesh to serve a model."""
    wish = DeployWish(model_id, kv_tokens or 0, priority, context or 0, sessions or 0, replicas or 0, kv)
    with admin_client(tracker, secret) as client:
        model, shortfall = client.deploy(wish)
    console.print(
        f"{model.model_id} is deployed: {model.manifest.num_layers} layers. `meshnet status` shows how it loads."
    )
    if shortfall:
        console.print(shortfall, style="red")


@app.command()
def undeploy(
    model_id: Annotated[str, typer.Argument(help="A deployed model.")],
    tracker: TrackerOption = "127.0.0.1:7700",
    secret: SecretOption = None,
) -> None:
    """Stop serving a model and free its memory on all nodes."""
    with admin_client(tracker, secret) as client:
        client.undeploy(model_id)
    console.print(f"{model_id} is no longer deployed.")


@app.command()
def drain(
    node_id: Annotated[str, typer.Argument(help="A node of the mesh.")],
    tracker: TrackerOption = "127.0.0.1:7700",
    secret: SecretOption = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Let the node take layers again.")] = False,
) -> None:
    """Move a node's layers to others, so that it can be taken away."""
    with admin_client(tracker, secret) as client:
        shortfalls = client.drain(node_id, cancel)
    if cancel:
        console.print(f"{node_id} is no longer drained.")
        return
    console.print(f"{node_id} is drained. Stop it when `meshnet status` shows no layers on it.")
    for shortfall in shortfalls:
        console.print(shortfall, style="red")


@app.command()
def evict(
    node_id: Annotated[str, typer.Argument(help="A node of the mesh.")],
    tracker: TrackerOption = "127.0.0.1:7700",
    secret: SecretOption = None,
) -> None:
    """Throw a node out at once. It may come back when it is started again."""
    with admin_client(tracker, secret) as client:
        client.evict(node_id)
    console.print(f"{node_id} is evicted.")


app.add_typer(models_app, name="models")

for command in (describe, directives, plan, rebalance, events, token):
    app.command()(command)

app.command(name="estimate")(estimate_command)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="The gateway.", envvar="MESHNET_GATEWAY")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the mesh serves.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of one answer.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.", min=0, max=2)] = 0.0,
    secret: SecretOption = None,
) -> None:
    """Talk to a model of the mesh. Questions may also come over a pipe, one a line."""
    try:
        url = url.rstrip("/")
        succeeded = run_chat(Answering(url, model or first_model(url, secret), max_tokens, temperature, secret), system)
    except ChatFailed as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if not succeeded and not sys.stdin.isatty():
        raise typer.Exit(1)
