"""Run by test_partition: two hosts that say so when a datagram arrives."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.links.namespaces import Host, hosts, isolate
from tests.faults.partition import deaf, parted

NUM_SENT = 400
# A datagram that is let through has arrived when the call that sends it returns; the rest is for a busy machine.
QUIET_SECONDS = 0.3
COUNT = f"""
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind((sys.argv[1], 7))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    print("ready", flush=True)
    sys.stdin.readline()
    s.settimeout({QUIET_SECONDS})
    count = 0
    try:
        while s.recv(9):
            count += 1
    except TimeoutError:
        print(count, flush=True)
"""
SEND = f"""
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    for _ in range({NUM_SENT}):
        s.sendto(b"x", (sys.argv[1], 7))
"""


def num_heard(host: Host, of: Host) -> int:
    """Of datagrams that the other sends."""
    command = [*host.prefix, sys.executable, "-c", COUNT, host.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as counting:
        assert counting.stdout
        assert counting.stdout.readline() == "ready\n"
        subprocess.run([*of.prefix, sys.executable, "-c", SEND, host.address], check=True)
        told, _ = counting.communicate("\n")
    return int(told)


def main() -> None:
    isolate("tests.faults.parted_hosts")
    with hosts(2, None) as (one, other):
        assert num_heard(one, other) == num_heard(other, one) == NUM_SENT
        with deaf(one, other):
            assert num_heard(one, other) == 0
            assert num_heard(other, one) == NUM_SENT
        with parted(one, other):
            assert num_heard(one, other) == num_heard(other, one) == 0
        with deaf(one, other, loss=0.5):
            assert 0 < num_heard(one, other) < NUM_SENT
        assert num_heard(one, other) == NUM_SENT


if __name__ == "__main__":
    main()
