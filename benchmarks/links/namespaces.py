"""Hosts on this machine: network namespaces with a network card each, as fast as wished (tc), on one switch.

All is inside the network namespace of this process, which `isolate` makes: nothing of it is on the machine's network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

SUBNET = "10.77.0"
SWITCH_ADDRESS = f"{SUBNET}.1"
ISOLATED = "MESHNET_ISOLATED"
# What may be sent at once, faster than the rate. With less the rate is not reached, and into more a frame would fit.
BURST_SECONDS, MIN_BURST_BYTES = 0.00025, 3200


@dataclass(frozen=True)
class Host:
    """`address` is reached from all other hosts and from this process."""

    namespace: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command, makes it run there."""
        return ("ip", "netns", "exec", self.namespace)


def isolate(module: str) -> None:
    """Runs `python -m MODULE` again, with the same arguments, in a network namespace of its own. Returns there.

    Raises SystemExit where that is not possible.
    """
    if os.environ.get(ISOLATED):
        # Namespaces have names, which outlive their processes unless they are taken away.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        _run("ip link set lo up")
        return
    if os.geteuid() or not all(map(shutil.which, ("unshare", "ip", "tc"))):
        raise SystemExit("network namespaces need root, and the commands unshare, ip and tc")
    command = ["unshare", "--net", sys.executable, "-m", module, *sys.argv[1:]]
    os.execvpe(command[0], command, {**os.environ, ISOLATED: "1"})  # noqa: S606


@contextlib.contextmanager
def hosts(num_hosts: int, rate: float | None) -> Iterator[list[Host]]:
    """`rate` of each host's card, in bit/s, in each direction; None: as fast as the machine is."""
    with contextlib.ExitStack() as stack:
        _run("ip link add switch type bridge")
        stack.callback(_run, "ip link del switch")
        _run(f"ip addr add {SWITCH_ADDRESS}/24 dev switch")
        _run("ip link set switch up")
        made = []
        for index in range(num_hosts):
            host = Host(f"meshnet-{os.getpid()}-{index}", f"{SUBNET}.{index + 2}")
            _run(f"ip netns add {host.namespace}")
            stack.callback(_run, f"ip netns del {host.namespace}")
            _plug_in(stack, host, f"port{index}", rate)
            made.append(host)
        yield made


def _plug_in(stack: contextlib.ExitStack, host: Host, port: str, rate: float | None) -> None:
    inside = f"-n {host.namespace}"
    _run(f"ip link add {port} type veth peer name card netns {host.namespace}")
    stack.callback(_run, f"ip link del {port}")
    _run(f"ip link set {port} master switch up")
    _run(f"ip {inside} addr add {host.address}/24 dev card")
    for device in ("lo", "card"):
        _run(f"ip {inside} link set {device} up")
    if rate is not None:
        burst = max(MIN_BURST_BYTES, int(rate / 8 * BURST_SECONDS))
        shape = f"root tbf rate {rate:.0f}bit burst {burst}b latency 100ms"
        _run(f"tc qdisc add dev {port} {shape}")
        _run(f"tc {inside} qdisc add dev card {shape}")


def _run(command: str) -> None:
    """Raises RuntimeError with what it said."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
