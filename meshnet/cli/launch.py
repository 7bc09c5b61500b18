"""Starts the services of a mesh on this machine, shows how they load, and ends them together."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import grpc
import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from meshnet.addresses import WILDCARD_HOSTS, join_address, split_address
from meshnet.cli.admin_client import AdminClient
from meshnet.cli.processes import Processes, ProcessFailed
from meshnet.model import KvPrecision
from meshnet.security.options import TOKEN_FILE
from meshnet.security.shared_secret import SharedSecret
from meshnet.topology import ShardState, Topology

START_SECONDS = 120.0
# A shard that reports no progress for this long is not slow but stuck.
STALL_SECONDS = 120.0
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Arguments of one node to start here. What is None has the node's own default."""

    node_id: str
    listen: str
    vram: str | None
    quantization: str
    threads: int | None
    device: str
    tracker_node: bool = False
    stub: bool = False
    site: str | None = None
    cache_dir: Path | None = None
    speculate: str | None = None


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """What to start. Addresses are HOST:PORT; `models` are ID=PATH or PATH.

    `state` is the file in which the tracker keeps what is deployed. `waits_for_others`: other machines will join, so
    too little memory is no error.
    """

    tracker_listen: str
    gateway_listen: str
    nodes: tuple[NodePlan, ...]
    models: tuple[str, ...]
    models_dir: Path | None
    deploy: tuple[str, ...]
    kv_tokens: int | None
    kv_precision: KvPrecision = KvPrecision.BFLOAT16
    advertise: str | None = None
    state: Path | None = None
    waits_for_others: bool = False
    log_to_terminal: bool = False
    log_level: str = "info"
    secret: SharedSecret | None = None
    insecure: bool = False

    @property
    def listens(self) -> dict[str, str]:
        """By what it is that listens there."""
        nodes = {node.node_id: node.listen for node in self.nodes}
        return {"the tracker at": self.tracker_listen, "the gateway at": self.gateway_listen, **nodes}


@dataclass(frozen=True, slots=True)
class RunningMesh:
    """Addresses of a mesh that has started."""

    tracker_address: str
    gateway_url: str


class Launcher:
    """One mesh's processes on this machine."""

    def __init__(self, plan: MeshPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self.log_dir = None if plan.log_to_terminal else Path(tempfile.mkdtemp(prefix="meshnet-"))
        self.processes = Processes(self.log_dir)
        self._said = ""

    @property
    def log_place(self) -> str:
        return str(self.log_dir) if self.log_dir else "the terminal"

    def start(self) -> RunningMesh:
        """Starts everything and waits until it listens. Raises ProcessFailed."""
        plan = self._plan
        arguments = ["--listen", plan.tracker_listen, "--log-level", plan.log_level]
        for model_id in plan.deploy:
            arguments += ["--deploy", model_id]
        if plan.kv_tokens:
            arguments += ["--kv-tokens", str(plan.kv_tokens)]
        arguments += ["--kv", plan.kv_precision.value]
        if plan.state:
            arguments += ["--state", str(plan.state)]
        arguments += self._security()
        tracker = self.processes.start("tracker", "services.tracker", arguments)
        port = self.processes.wait_ready(tracker, r"listening on \S+:(\d+)", START_SECONDS)[1]
        tracker_address = _reachable(plan.tracker_listen, int(port))
        nodes = [
            self.processes.start(node.node_id, "services.node", self._node(node, tracker_address))
            for node in plan.nodes
        ]
        gateway = self.processes.start("gateway", "services.gateway", self._gateway(tracker_address))
        with self._console.status("starting the nodes and the gateway"):
            for node in nodes:
                self.processes.wait_ready(node, r"listening on (\S+)", START_SECONDS)
            port = self.processes.wait_ready(gateway, r"listening on \S+:(\d+)", START_SECONDS)[1]
        return RunningMesh(tracker_address, f"http://{_reachable(plan.gateway_listen, int(port))}")

    def wait_until_served(self, mesh: RunningMesh) -> Topology:
        """Shows loading until every layer is served and the gateway knows it. Raises ProcessFailed."""
        client = AdminClient(mesh.tracker_address, self._plan.secret)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        try:
            with Progress(*columns, console=self._console, transient=True) as progress:
                self._wait_for_coverage(client, progress)
            self._wait_for_gateway(mesh)
            return client.topology()
        except grpc.RpcError as error:
            raise ProcessFailed(f"the tracker does not answer: {error}") from error
        finally:
            client.close()

    def _wait_for_coverage(self, client: AdminClient, progress: Progress) -> None:
        task = progress.add_task("loading layers", total=1.0)
        loaded, deadline = -1.0, time.monotonic() + STALL_SECONDS
        while True:
            self.processes.check()
            topology = client.topology()
            share = _loaded_share(topology)
            if topology.models and all(topology.coverage(model_id).complete for model_id in topology.models):
                return
            self._check_room(client, topology)
            progress.update(task, completed=share)
            if share != loaded or self._plan.waits_for_others:
                loaded, deadline = share, time.monotonic() + STALL_SECONDS
            if time.monotonic() > deadline:
                raise ProcessFailed(f"nothing was loaded for {STALL_SECONDS:g} s; logs are in {self.log_place}")
            time.sleep(POLL_SECONDS)

    def _check_room(self, client: AdminClient, topology: Topology) -> None:
        """If all nodes are here and the models do not fit: raises ProcessFailed, or says what we wait for."""
        if len(topology.nodes) < len(self._plan.nodes):
            return
        loading = any(shard.state is ShardState.LOADING for node in topology.nodes.values() for shard in node.shards)
        shortfall = "\n".join(client.shortfalls().values())
        if not shortfall or loading:
            return
        if not self._plan.waits_for_others:
            raise ProcessFailed(f"the nodes lend too little memory: raise --vram or add --nodes.\n{shortfall}")
        if shortfall != self._said:
            self._console.print(f"waiting for more nodes: {shortfall}")
            self._said = shortfall

    def _wait_for_gateway(self, mesh: RunningMesh) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.processes.check()
            try:
                if httpx.get(f"{mesh.gateway_url}/health", timeout=5.0).json().get("status") == "ok":
                    return
            except (httpx.HTTPError, ValueError):
                pass
            time.sleep(POLL_SECONDS)
        raise ProcessFailed(f"the gateway is not ready after {START_SECONDS:g} s; logs are in {self.log_place}")

    def wait(self) -> None:
        """Returns never. Raises ProcessFailed if a process ends, KeyboardInterrupt on Ctrl-C or SIGTERM."""
        while True:
            self.processes.check()
            time.sleep(POLL_SECONDS)

    def _node(self, node: NodePlan, tracker_address: str) -> list[str]:
        arguments = [
            *("--tracker", tracker_address, "--listen", node.listen, "--node-id", node.node_id),
            *("--quantization", node.quantization, "--device", node.device, "--log-level", self._plan.log_level),
        ]
        if node.vram:
            arguments += ["--vram", node.vram]
        if node.threads:
            arguments += ["--threads", str(node.threads)]
        if self._plan.advertise:
            arguments += ["--advertise", self._plan.advertise]
        if node.site:
            arguments += ["--site", node.site]
        if node.cache_dir:
            arguments += ["--cache-dir", str(node.cache_dir)]
        if node.speculate:
            arguments += ["--speculate", node.speculate]
        arguments += ["--tracker-node"] * node.tracker_node + ["--stub"] * node.stub
        return arguments + self._security() + self._models()

    def _gateway(self, tracker_address: str) -> list[str]:
        return [
            *("--tracker", tracker_address, "--listen", self._plan.gateway_listen),
            *("--log-level", self._plan.log_level, *self._security(), *self._models()),
        ]

    def _security(self) -> list[str]:
        """The name of the file, never what is in it: other users of this machine see command lines."""
        secret = self._plan.secret
        return [*([TOKEN_FILE, str(secret.path)] if secret else []), *["--insecure"] * self._plan.insecure]

    def _models(self) -> list[str]:
        arguments = [argument for model in self._plan.models for argument in ("--model", model)]
        return [*arguments, "--models", str(self._plan.models_dir)] if self._plan.models_dir else arguments


def _reachable(listen: str, port: int) -> str:
    """The address by which this machine reaches its own service."""
    host, _ = split_address(listen)
    return join_address("127.0.0.1" if host in WILDCARD_HOSTS else host, port)


def _loaded_share(topology: Topology) -> float:
    """Share of the deployed layers' bytes that is loaded, 0 to 1."""
    total = sum(node_bytes.bfloat16 for model in topology.models.values() for node_bytes in model.manifest.layers)
    done = sum(
        shard.bytes_done
        / max(shard.bytes_total, 1)
        * sum(topology.models[shard.model_id].manifest.layers[layer].bfloat16 for layer in shard.layers.layers)
        for node in topology.nodes.values()
        for shard in node.shards
        if shard.model_id in topology.models
    )
    return min(done / total, 1.0) if total else 0.0


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within it, SIGTERM ends the command as Ctrl-C does, so that it cleans up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
