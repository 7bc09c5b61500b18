"""A mesh of real processes, each behind proxies, to which a test does what machines and networks do."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import psutil

from meshnet.addresses import split_address
from meshnet.topology import Topology
from tests.e2e.mesh import SETTLE_SECONDS, Mesh, NodeSpec, running_mesh
from tests.e2e.streams import STREAM_SECONDS, Streams
from tests.e2e.watcher import holders
from tests.faults.behaviour import PASS, Behaviour
from tests.faults.proxy import Address, Proxy
from tests.processes import RunningProcess, wait_until

# Processes listen at the first; each is known by another one, where only proxies listen.
DIRECT = "127.0.0.1"
# Processes end under it.
NO_POOL = httpx.Limits(max_keepalive_connections=0)
TRACKER_FRONT = "127.0.1.1"
# What a service's own log says when something went wrong that it did not expect.
_UNEXPECTED = re.compile(r"^Traceback|^\S+ \S+ (?:ERROR|CRITICAL) .*", re.MULTILINE)


@dataclass
class Fronts:
    """The proxies before a node: where frames come in, and where prompts do."""

    forward: Proxy
    prompts: Proxy

    def behave(self, behaviour: Behaviour) -> None:
        self.forward.behave(behaviour)
        self.prompts.behave(behaviour)


@dataclass
class FaultyMesh:
    """`specs` are of all nodes that belong to it, whether they run or not."""

    mesh: Mesh
    model_id: str
    specs: dict[str, NodeSpec]
    tracker_front: Proxy
    fronts: dict[str, Fronts] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    # One for all: to make one takes longer than to ask.
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=10, limits=NO_POOL))

    # What it does

    def start_missing(self) -> None:
        """Starts all nodes that do not run, each behind proxies of its own."""
        self.bury()
        missing = [spec for node_id, spec in self.specs.items() if node_id not in self.mesh.nodes]
        self.mesh.start_nodes([replace(s, options=(*s.options, "--advertise", self._host(s.node_id))) for s in missing])
        for spec in missing:
            ports = (split_address(self.mesh.nodes[spec.node_id].match[i])[1] for i in (1, 2))
            host = self._host(spec.node_id)
            self.fronts[spec.node_id] = Fronts(*(Proxy((host, port), (DIRECT, port)) for port in ports))

    def kill(self, name: str) -> None:
        """A node, or the tracker."""
        self.processes()[name].process.kill()

    def stop(self, name: str) -> None:
        """It does nothing any more, and the system takes in what it is sent."""
        self.processes()[name].process.send_signal(signal.SIGSTOP)
        self.stopped.add(name)

    def go_on(self, name: str) -> None:
        self.processes()[name].process.send_signal(signal.SIGCONT)
        self.stopped.discard(name)

    def bury(self) -> None:
        """Forgets nodes whose process has ended."""
        for node_id in self.dead():
            self.stopped.discard(node_id)
            with self.mesh.nodes.pop(node_id):
                pass
            self.close_fronts(node_id)

    def close_fronts(self, node_id: str) -> None:
        fronts = self.fronts.pop(node_id)
        fronts.forward.close()
        fronts.prompts.close()

    def close(self) -> None:
        for node_id in tuple(self.fronts):
            self.close_fronts(node_id)
        self._http.close()

    def heal(self) -> None:
        """All that is there works again as if nothing had been; nodes that ended are not started."""
        self.tracker_front.behave(PASS)
        for fronts in self.fronts.values():
            fronts.behave(PASS)
        for name in tuple(self.stopped):
            self.go_on(name)
        if self.mesh.tracker.process.poll() is not None:
            self.mesh.restart_tracker()

    # What is seen of it

    def dead(self) -> list[str]:
        return [node_id for node_id, node in self.mesh.nodes.items() if node.process.poll() is not None]

    def health(self, node_id: str) -> dict[str, Any]:
        """Past the proxies."""
        port = split_address(self.mesh.nodes[node_id].match[1])[1]
        body: dict[str, Any] = self._http.get(f"http://{DIRECT}:{port}/health").json()
        return body

    def num_sessions(self) -> dict[str, int]:
        """By node."""
        return {node_id: int(self.health(node_id)["sessions"]) for node_id in self.mesh.nodes}

    def busiest(self, layer: int, topology: Topology, before: Mapping[str, int]) -> str | None:
        """Of the nodes that serve a layer the one with the most sessions beyond those before, if any has some."""
        serving = sorted(holders(topology, self.model_id)[layer] & before.keys())
        counts = self.num_sessions()
        more = {node_id: counts[node_id] - before[node_id] for node_id in serving}
        most = max(serving, key=more.__getitem__)
        return most if more[most] > 0 else None

    def wait_until_busy(self, layer: int, before: Mapping[str, int], clients: Streams) -> str:
        """The `busiest` node, once there is one. AssertionError if the clients' streams end before that."""
        topology = self.mesh.topology()
        found: list[str] = []

        def look() -> bool:
            busiest = self.busiest(layer, topology, before)
            found[:] = [busiest] if busiest else []
            return bool(found) or not clients.num_running

        wait_until(look, STREAM_SECONDS, f"a session is at layer {layer}")
        assert found, "the streams ended before it was seen where they are"
        return found[0]

    def is_idle(self) -> bool:
        """Whether no node has a session. AssertionError if one has none and not all its KV room."""
        for node_id in self.mesh.nodes:
            health = self.health(node_id)
            if health["sessions"]:
                return False
            for kv in health["kv"].values():
                assert kv["tokens_free"] == kv["tokens"], (node_id, kv)
        return True

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        wait_until(self.is_idle, seconds, "all sessions are freed", self.sessions_left)

    def sessions_left(self) -> str:
        return f"sessions by node: {self.num_sessions()}"

    def wait_until_whole(self, seconds: float = SETTLE_SECONDS) -> Topology:
        """Every layer is served twice, and a token has come through from both entry nodes."""
        return self.mesh.wait_for(self._is_whole, "all is held twice", seconds)

    def _is_whole(self, topology: Topology) -> bool:
        if topology.nodes.keys() != self.specs.keys() or not all(node.alive for node in topology.nodes.values()):
            return False
        ready = {probe.hops[0].node_id for probe in topology.probes(self.model_id) if probe.ready}
        held = holders(topology, self.model_id)
        return all(len(serving) >= 2 for serving in held) and held[0] <= ready

    def processes(self) -> dict[str, RunningProcess]:
        assert self.mesh.gateway
        return {"tracker": self.mesh.tracker, "gateway": self.mesh.gateway, **self.mesh.nodes}

    def num_files(self) -> dict[int, int]:
        """Open files and sockets, by process."""
        pids = [process.process.pid for process in self.processes().values() if process.process.poll() is None]
        return {pid: psutil.Process(pid).num_fds() for pid in pids}

    def log_marks(self) -> dict[str, int]:
        """Where the log of each process ends now."""
        return {name: len(process.output()) for name, process in self.processes().items()}

    def unexpected(self, marks: dict[str, int]) -> list[str]:
        """What logs have said since then that no fault explains."""
        return [
            f"{name}: {found[0]}"
            for name, process in self.processes().items()
            for found in _UNEXPECTED.finditer(process.output()[marks.get(name, 0) :])
        ]

    def _host(self, node_id: str) -> str:
        return f"127.0.2.{1 + list(self.specs).index(node_id)}"


@contextlib.contextmanager
def faulty_mesh(
    models: Sequence[str],
    specs: Sequence[NodeSpec],
    *,
    model_id: str,
    kv_tokens: int,
    tracker_options: Sequence[str],
    say: Callable[[str], object] = str,
) -> Iterator[FaultyMesh]:
    """Starts all, and waits until every layer is served twice."""
    with contextlib.ExitStack() as stack:
        # Outermost: what stops still speaks through them.
        ends = stack.enter_context(contextlib.ExitStack())
        mesh = stack.enter_context(
            running_mesh(models, [], kv_tokens=kv_tokens, tracker_options=("--deploy", model_id, *tracker_options))
        )
        server: Address = split_address(mesh.tracker_address)
        front = Proxy((TRACKER_FRONT, server[1]), server)
        ends.callback(front.close)
        mesh.tracker_front = front.address
        faulty = FaultyMesh(mesh, model_id, {spec.node_id: spec for spec in specs}, front)
        ends.callback(faulty.close)
        say(f"starting {len(specs)} nodes")
        faulty.start_missing()
        mesh.start_gateway(until_ready=False)
        assert mesh.gateway
        stack.enter_context(mesh.gateway)
        # What does not run again could not stop.
        stack.callback(faulty.bury)
        stack.callback(faulty.heal)
        faulty.wait_until_whole()
        yield faulty
