"""A whole mesh of real processes for the end-to-end tests."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import httpx

from meshnet import convert
from meshnet.security.bearer import bearer
from meshnet.security.grpc_signing import SignedChannel
from meshnet.security.options import TOKEN_FILE
from meshnet.security.shared_secret import SharedSecret
from meshnet.topology import Topology
from meshnet.v1 import inference_pb2, inference_pb2_grpc, tracker_pb2, tracker_pb2_grpc
from tests.processes import RunningProcess, start, wait_until

START_SECONDS = 120.0
SETTLE_SECONDS = 120.0
CALL_SECONDS = 180.0
# A second of work for each node, and they share the cores.
STOP_ALL_SECONDS = 60.0


@dataclass(frozen=True)
class NodeSpec:
    """A node to start. `vram` is a size as the command line takes it. `models` (ID=PATH): its own files, where they are
    not those of the whole mesh; empty: it has none. `prefix`: the command that starts it somewhere else than here."""

    node_id: str
    vram: str
    quantization: str = "bfloat16"
    tracker_node: bool = False
    stub: bool = False
    options: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    prefix: tuple[str, ...] = ()


@dataclass
class Mesh:
    """Processes that serve `models` (ID=PATH), and calls to them. Ends with an integrity check of all nodes."""

    models: Sequence[str]
    tracker: RunningProcess
    tracker_address: str
    nodes: dict[str, RunningProcess] = field(default_factory=dict)
    gateway: RunningProcess | None = None
    gateway_url: str = ""
    tracker_options: Sequence[str] = ()
    tracker_front: str = ""
    """The address by which nodes and gateway know the tracker, if that is not its own."""
    secret: SharedSecret | None = None

    def restart_tracker(self) -> None:
        """Starts a new tracker in the place of one that was killed."""
        with self.tracker:
            self.tracker.kill()
        self.tracker = _start_tracker(self.tracker_address, self.tracker_options)

    def exit_tracker(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tracker.__exit__(kind, error, trace)

    def kill_node(self, node_id: str) -> None:
        """SIGKILL: it is gone as if its machine were."""
        with self.nodes.pop(node_id) as process:
            process.kill()

    def start_nodes(self, specs: Sequence[NodeSpec]) -> None:
        with ThreadPoolExecutor(max(len(specs), 1)) as pool:
            for spec, process in zip(specs, pool.map(self._start_node, specs), strict=True):
                self.nodes[spec.node_id] = process

    def stop_node(self, node_id: str) -> None:
        """SIGTERM, and a clean exit."""
        with self.nodes.pop(node_id):
            pass

    def start_gateway(self, *, until_ready: bool = True) -> None:
        self.gateway = self.another_gateway(until_ready=until_ready)
        self.gateway_url = self.gateway.match[1]

    def another_gateway(self, *, until_ready: bool = True) -> RunningProcess:
        """Which the mesh does not know of. Its address is the first group of `match`."""
        gateway = start(
            [
                "-m",
                "services.gateway",
                "--tracker",
                self.tracker_front or self.tracker_address,
                "--listen",
                "127.0.0.1:0",
                *_secret_options(self.secret),
                *_model_options(self.models),
            ],
            re.compile(r"listening on (http://\S+)"),
            START_SECONDS,
        )
        if until_ready:
            wait_until(lambda: _is_ready(gateway.match[1]), SETTLE_SECONDS, "the gateway's /health is ok")
        return gateway

    def _start_node(self, spec: NodeSpec) -> RunningProcess:
        return start(
            [
                *(
                    "-m",
                    "services.node",
                    "--tracker",
                    self.tracker_front or self.tracker_address,
                    "--listen",
                    "127.0.0.1:0",
                ),
                *("--node-id", spec.node_id, "--vram", spec.vram, "--quantization", spec.quantization),
                *("--threads", "1", *["--tracker-node"] * spec.tracker_node, *["--stub"] * spec.stub),
                *_secret_options(self.secret),
                *spec.options,
                *_model_options(self.models if spec.models is None else spec.models),
            ],
            re.compile(r"listening on (\S+) \(gRPC (\S+)\)"),
            START_SECONDS,
            prefix=spec.prefix,
        )

    def channel(self, address: str) -> grpc.Channel:
        opened = grpc.insecure_channel(address)
        return SignedChannel(opened, self.secret) if self.secret else opened

    def topology(self) -> Topology:
        with self.channel(self.tracker_address) as channel:
            stub = tracker_pb2_grpc.TrackerStub(channel)
            request = tracker_pb2.GetTopologyRequest()
            # A tracker that was just restarted may be in the backoff of an earlier connection.
            return convert.topology_from_proto(stub.GetTopology(request, timeout=10, wait_for_ready=True))

    def layers(self, model_id: str) -> dict[str, list[str]]:
        """Ready layer ranges by node, for nodes that have some."""
        held: dict[str, list[str]] = {}
        for node in self.topology().nodes.values():
            for shard in node.shards:
                if shard.model_id == model_id and shard.state.value == "ready":
                    held.setdefault(node.node_id, []).append(str(shard.layers))
        return held

    def wait_for(self, condition: Callable[[Topology], bool], what: str, seconds: float = SETTLE_SECONDS) -> Topology:
        latest: list[Topology] = []

        def ready() -> bool:
            latest[:] = [self.topology()]
            return condition(latest[0])

        wait_until(ready, seconds, what, self.logs)
        return latest[0]

    def wait_until_complete(self, model_id: str) -> Topology:
        def complete(topology: Topology) -> bool:
            return model_id in topology.models and topology.coverage(model_id).complete

        return self.wait_for(complete, f"{model_id} is covered")

    def generate(
        self, model_id: str, prompt: Sequence[int], max_new_tokens: int, node_id: str | None = None, **sampling: Any
    ) -> list[int]:
        """Token ids from an entry node, over its own gRPC service."""
        return self.generate_and_count(model_id, prompt, max_new_tokens, node_id, **sampling)[0]

    def generate_and_count(
        self, model_id: str, prompt: Sequence[int], max_new_tokens: int, node_id: str | None = None, **sampling: Any
    ) -> tuple[list[int], int]:
        """The same, and how many tokens of the prompt were reused."""
        entry = node_id or self.topology().entry_nodes(model_id)[0].node_id
        with self.channel(self.nodes[entry].match[2]) as channel:
            request = inference_pb2.GenerateRequest(
                request_id=str(uuid.uuid4()),
                model_id=model_id,
                prompt_token_ids=prompt,
                max_new_tokens=max_new_tokens,
                sampling=inference_pb2.SamplingParams(**sampling),
            )
            events = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=CALL_SECONDS))
            tokens = [event.token_id for event in events if event.HasField("token_id")]
            return tokens, sum(event.cached_tokens for event in events)

    def health(self, node_id: str) -> dict[str, Any]:
        url = f"http://{self.nodes[node_id].match[1]}/health"
        body: dict[str, Any] = httpx.get(url, timeout=10, auth=bearer(self.secret)).json()
        return body

    def wait_until_idle(self) -> None:
        """Waits until no node has a session. Whenever a node says that it has none, all its KV room must be free."""
        wait_until(lambda: all(self._is_idle(node_id) for node_id in self.nodes), 30, "all sessions are freed")

    def _is_idle(self, node_id: str) -> bool:
        # One answer for both: a probe may begin between two.
        health = self.health(node_id)
        if health["sessions"]:
            return False
        for model_id, kv in health["kv"].items():
            assert kv["tokens_free"] == kv["tokens"], (node_id, model_id, kv)
        return True

    def logs(self) -> str:
        processes = {"tracker": self.tracker, **self.nodes}
        if self.gateway:
            processes["gateway"] = self.gateway
        return "\n".join(f"--- {name}\n{process.output()[-3000:]}" for name, process in processes.items())


@contextlib.contextmanager
def running_mesh(
    models: Sequence[str],
    nodes: Sequence[NodeSpec],
    *,
    deploy: Sequence[str] = (),
    kv_tokens: int | None = None,
    gateway: bool = False,
    tracker_options: Sequence[str] = (),
    secret: SharedSecret | None = None,
) -> Iterator[Mesh]:
    """Starts tracker, nodes and perhaps a gateway; stops them all and requires clean exits. `secret`: of them all."""
    options = [option for model_id in deploy for option in ("--deploy", model_id)]
    if kv_tokens:
        options += ["--kv-tokens", str(kv_tokens)]
    options += [*_secret_options(secret), *tracker_options]
    tracker = _start_tracker("127.0.0.1:0", options)
    with contextlib.ExitStack() as stack:
        mesh = Mesh(models, tracker, tracker.match[1], tracker_options=options, secret=secret)
        stack.push(mesh.exit_tracker)
        stack.callback(_stop_nodes, mesh)
        mesh.start_nodes(nodes)
        for model_id in deploy:
            mesh.wait_until_complete(model_id)
        if gateway:
            mesh.start_gateway()
            assert mesh.gateway
            stack.enter_context(mesh.gateway)
        yield mesh


def _is_ready(gateway_url: str) -> bool:
    return bool(httpx.get(f"{gateway_url}/health", timeout=10).json().get("status") == "ok")


def _start_tracker(listen: str, options: Sequence[str]) -> RunningProcess:
    arguments = ["-m", "services.tracker", "--listen", listen, *options]
    return start(arguments, re.compile(r"listening on (\S+)"), START_SECONDS)


def _secret_options(secret: SharedSecret | None) -> list[str]:
    return [TOKEN_FILE, str(secret.path)] if secret else []


def _model_options(models: Sequence[str]) -> list[str]:
    return [option for model in models for option in ("--model", model)]


def _stop_nodes(mesh: Mesh) -> None:
    """Together: each takes a moment to leave."""
    alive = [process for process in mesh.nodes.values() if process.process.poll() is None]
    with ThreadPoolExecutor(max(len(alive), 1)) as pool:
        outcomes = [pool.submit(process.stop, STOP_ALL_SECONDS) for process in alive]
    for process in mesh.nodes.values():
        with process:
            pass  # closes its output
    for outcome in outcomes:
        outcome.result()
