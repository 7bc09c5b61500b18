"""Hosts in network namespaces (see benchmarks/links/namespaces.py) that no longer hear each other.

All of it must run in a network namespace of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator

from benchmarks.links.namespaces import Host


def missing_for_partitions() -> str:
    """Why there can be none here; empty if there can."""
    if not all(map(shutil.which, ("unshare", "ip", "tc", "iptables"))):
        return "needs the commands unshare, ip, tc and iptables"
    command = "iptables -A INPUT -s 10.77.0.9 -m statistic --mode random --probability 0.5 -j DROP"
    done = subprocess.run(["unshare", "--net", *command.split()], capture_output=True, check=False)
    return "" if done.returncode == 0 else "network namespaces or iptables do not work here"


@contextlib.contextmanager
def deaf(host: Host, to: Host, loss: float = 1.0) -> Iterator[None]:
    """For the length of a `with`, `host` hears nothing of what the other sends; the other still hears it.

    `loss`: of that share of packets only.
    """
    chance = "" if loss == 1.0 else f" -m statistic --mode random --probability {loss}"
    rule = f"INPUT -s {to.address}{chance} -j DROP"
    _run(host, f"iptables -I {rule}")
    try:
        yield
    finally:
        _run(host, f"iptables -D {rule}")


@contextlib.contextmanager
def parted(host: Host, other: Host) -> Iterator[None]:
    """Neither hears the other."""
    with deaf(host, other), deaf(other, host):
        yield


def _run(host: Host, command: str) -> None:
    subprocess.run([*host.prefix, *command.split()], check=True, capture_output=True)
