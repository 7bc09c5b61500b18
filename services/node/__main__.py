"""`meshnet node`: lends this machine's memory to a mesh."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from pathlib import Path
from typing import Annotated

import psutil
import typer

from meshnet.addresses import WILDCARD_HOSTS, split_address
from meshnet.errors import InvalidRequest, MeshnetError
from meshnet.model import ModelManifest, parse_quantizations
from meshnet.model_files import HubModel, ModelFiles, local_models, locate_models
from meshnet.security.options import InsecureOption, SecretOption
from meshnet.security.startup import check_listens
from meshnet.service import configure_logging, expected_error, run_process, run_until_stopped
from meshnet.sizes import format_size, parse_size
from meshnet.speculate import Speculate
from meshnet.topology import check_node_id
from services.node.config import NodeConfig
from services.node.core.compression import Compression
from services.node.core.work import Executor
from services.node.fetching.source import Source
from services.node.files.host_memory import free_host_bytes
from services.node.files.manifest import read_manifest
from services.node.node import NodeServer
from services.node.speed_cache import default_cache_dir
from services.node.stub import StubExecutor

log = logging.getLogger("meshnet.node")

app = typer.Typer(add_completion=False)


@app.command(name="node")
def main(
    tracker: Annotated[
        str, typer.Option(help="Tracker to join, HOST:PORT.", envvar="MESHNET_TRACKER")
    ] = "127.0.0.1:7700",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Weights: ID=PATH or PATH of a Hugging Face directory or a GGUF file, or hf:ORG/NAME@REVISION. "
            "Repeatable."
        ),
    ] = None,
    models: Annotated[
        Path | None, typer.Option(help="Folder whose entries are models.", envvar="MESHNET_MODELS")
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option(
            help="Memory to lend, for weights, KV cache and workspace together: 8GiB, 500MB. "
            "Default: half of what is free.",
            envvar="MESHNET_VRAM",
        ),
    ] = None,
    quantization: Annotated[
        str,
        typer.Option(
            help="How to store weights: bfloat16, int8, nf4 or float32. Several, with commas: the first is preferred, "
            "the others are for what does not fit at it.",
            envvar="MESHNET_QUANTIZATION",
        ),
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", envvar="MESHNET_DEVICE")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(help="CPU threads for the layers. Default: all cores.", min=1, envvar="MESHNET_THREADS"),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="Address for frames (HTTP), HOST:PORT; port 0 is any free one.", envvar="MESHNET_LISTEN")
    ] = "127.0.0.1:7710",
    grpc_listen: Annotated[
        str | None,
        typer.Option(help="Address for prompts (gRPC). Default: the next port.", envvar="MESHNET_GRPC_LISTEN"),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            help="Host name or address by which other machines reach this one. Default: the one it listens at.",
            envvar="MESHNET_ADVERTISE",
        ),
    ] = None,
    node_id: Annotated[
        str | None, typer.Option(help="Name of this node. Default: host name and port.", envvar="MESHNET_NODE_ID")
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="What may fail as one: nodes of one machine or room. Default: the host name.", envvar="MESHNET_SITE"
        ),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for measured speeds and fetched weights. Default: meshnet in the user's cache folder.",
            envvar="MESHNET_CACHE_DIR",
        ),
    ] = None,
    fetch: Annotated[
        bool,
        typer.Option(
            help="Also take layers of models whose files are not here; their weights, and no others, are fetched from "
            "nodes that have them, and kept in the cache folder.",
            envvar="MESHNET_FETCH",
        ),
    ] = True,
    prefix_reuse: Annotated[
        bool,
        typer.Option(
            help="Keep KV caches of ended sessions, in room that nobody needs, for prompts that begin in the same way.",
            envvar="MESHNET_PREFIX_REUSE",
        ),
    ] = True,
    compression: Annotated[
        Compression,
        typer.Option(
            help="Compress frames to other nodes: over links where that has proved faster, never, or always.",
            envvar="MESHNET_COMPRESSION",
        ),
    ] = Compression.AUTO,
    speculate: Annotated[
        Speculate,
        typer.Option(
            help="Guess tokens from what was said before and check several in one step, where that has proved faster; "
            "what is generated stays the same.",
            envvar="MESHNET_SPECULATE",
        ),
    ] = Speculate.AUTO,
    resume_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds in which a generation whose hop has failed must go on, over another route or when its layers "
            "are back.",
            min=0.0,
            envvar="MESHNET_RESUME_TIMEOUT",
        ),
    ] = 60.0,
    tracker_node: Annotated[
        bool, typer.Option("--tracker-node", help="This is the tracker-node's node: it takes the first layers.")
    ] = False,
    stub: Annotated[
        bool, typer.Option("--stub", help="No weights and no torch: answers zeros. For trying out large meshes.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", envvar="MESHNET_LOG_LEVEL")] = "info",
    secret: SecretOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Lends this machine's memory to a mesh: loads the layers that the tracker assigns and runs them."""
    try:
        configure_logging(log_level)
        files = locate_models(model or (), models)
        host, port = split_address(listen)
        preferred, *fallbacks = parse_quantizations(quantization)
        config = NodeConfig(
            node_id=check_node_id(node_id or f"{socket.gethostname()}-{port}"),
            tracker_address=tracker,
            forward_listen=listen,
            grpc_listen=grpc_listen or f"{listen.rpartition(':')[0]}:{port + 1 if port else 0}",
            advertise_host=advertise or _own_host(host, tracker),
            vram_bytes=parse_size(vram) if vram else free_host_bytes() // 2,
            quantization=preferred,
            fallbacks=tuple(fallbacks),
            site=site or socket.gethostname(),
            cache_dir=cache_dir or default_cache_dir(),
            fetch=fetch,
            prefix_reuse=prefix_reuse,
            models=local_models(files),
            hub={i: model for i, model in files.items() if isinstance(model, HubModel)},
            device=device,
            threads=threads or psutil.cpu_count(logical=False) or 1,
            secret=secret,
            stub=stub,
            tracker_node=tracker_node,
            resume_timeout=resume_timeout,
            compression=compression,
            speculate=speculate,
        )
        listens = {"--listen": config.forward_listen, "--grpc-listen": config.grpc_listen}
        check_listens(listens, secret, insecure=insecure)
        asyncio.run(run_until_stopped(_serve(config)))
    except (MeshnetError, OSError, RuntimeError, BaseExceptionGroup) as error:
        typer.echo(f"meshnet node: {expected_error(error)}", err=True)
        raise typer.Exit(1) from None


async def _serve(config: NodeConfig) -> None:
    manifests, hub = await asyncio.to_thread(_read_models, config)
    executor = _executor(config)
    # What torch and its like consist of stays. To look through it with each shard that goes held up all else that this
    # process does, heartbeats too: for 0.3 s, and on a busy machine for so long that the node was lost.
    gc.collect()
    gc.freeze()
    _check_free(config, executor)
    node = NodeServer(config, executor, manifests, hub)
    try:
        await node.start()
        quantizations = ", ".join((config.quantization, *config.fallbacks))
        lends = f"lends {format_size(config.vram_bytes)} at {quantizations}"
        typer.echo(
            f"meshnet node {config.node_id} listening on {node.forward_address} (gRPC {node.grpc_address}), {lends}"
        )
        await node.run()
    finally:
        await node.stop()


def _read_models(config: NodeConfig) -> tuple[dict[str, ModelManifest], dict[str, Source]]:
    """Manifests of the models that can be served, and the sources of those that come from a hub. The others are named
    and left out."""
    manifests: dict[str, ModelManifest] = {}
    hub: dict[str, Source] = {}
    for model_id, model in (config.models | config.hub).items():
        try:
            if isinstance(model, ModelFiles):
                manifests[model_id] = read_manifest(model)
            else:
                manifests[model_id], hub[model_id] = _open_hub_model(config, model)
        except MeshnetError as error:
            log.error("model %s cannot be served: %s", model_id, error)  # noqa: TRY400 (the message is the point)
    if (config.models or config.hub) and not manifests:
        raise InvalidRequest("none of the models can be served; the lines above say why")
    return manifests, hub


def _open_hub_model(config: NodeConfig, model: HubModel) -> tuple[ModelManifest, Source]:
    # The hub's library takes a moment to import.
    from services.node.fetching.hub_models import open_hub_model

    assert config.weights_dir, "the command line always names a cache folder"
    opened = open_hub_model(config.weights_dir, model)
    return opened.manifest, opened.source


def _executor(config: NodeConfig) -> Executor:
    if config.stub:
        log.warning("STUB NODE: it holds no weights and answers zeros. Nothing it says means anything.")
        return StubExecutor()
    # Torch takes seconds to import, and a stub node's machine may not have it.
    from services.node.engine.executor import TorchExecutor

    return TorchExecutor(config.models, config.device, config.threads)


def _check_free(config: NodeConfig, executor: Executor) -> None:
    free_bytes = executor.memory_free_bytes()
    if free_bytes is not None and config.vram_bytes > free_bytes:
        log.warning(
            "this node lends %s, but only %s of the memory of %s are free now: loads may fail. Lower --vram, or end "
            "what else uses it.",
            format_size(config.vram_bytes),
            format_size(free_bytes),
            config.device,
        )


def _own_host(listen_host: str, tracker: str) -> str:
    """The address by which the tracker's machine reaches this one, if we listen at all of them."""
    if listen_host not in WILDCARD_HOSTS:
        return listen_host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # A datagram socket that is connected sends nothing; it only asks the routing table.
            probe.connect(split_address(tracker))
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return socket.gethostname()


if __name__ == "__main__":
    run_process(lambda: app(prog_name="meshnet node"))
