from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.links.__main__ import Link, parse_link
from benchmarks.links.namespaces import ISOLATED
from tests.processes import ROOT

TWO_HOSTS = """
import subprocess
from benchmarks.links.namespaces import hosts, isolate
isolate("none")
for rate in (1e8, 1e9):
    with hosts(2, rate) as (first, second):
        listener = 'import socket, sys; s = socket.create_server((sys.argv[1], 0));'
        listener += 'print(s.getsockname()[1], flush=True); s.accept()[0].sendall(b"reached")'
        server = subprocess.Popen([*second.prefix, "python3", "-c", listener, second.address], stdout=subprocess.PIPE)
        port = server.stdout.readline().decode().strip()
        client = 'import socket, sys; print(socket.create_connection((sys.argv[1], sys.argv[2]), 10).recv(99).decode())'
        subprocess.run([*first.prefix, "python3", "-c", client, second.address, port], check=True)
        server.wait(10)
        subprocess.run([*first.prefix, "tc", "qdisc", "show", "dev", "card"], check=True)
        subprocess.run(["tc", "qdisc", "show", "dev", "port1"], check=True)
"""


def _namespaces_work() -> bool:
    tools = all(map(shutil.which, ("unshare", "ip", "tc")))
    return tools and subprocess.run(["unshare", "--net", "ip", "netns", "list"], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("local", Link("local")),
        ("100mbit", Link("100mbit", rate=1e8)),
        ("2.5gbit", Link("2.5gbit", rate=2.5e9)),
        ("20ms", Link("20ms", delay=0.02)),
    ],
)
def test_a_link_is_a_rate_or_a_delay(text: str, link: Link) -> None:
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "fast", "20", "20 ms", "ms"])
def test_other_links_are_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="20ms"):
        parse_link(text)


@pytest.mark.skipif(not _namespaces_work(), reason="needs root and network namespaces")
def test_hosts_reach_each_other_through_cards_of_the_rate_and_leave_nothing_behind() -> None:
    before = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", TWO_HOSTS],
        cwd=ROOT, env={**os.environ, ISOLATED: "1"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reached") == 2
    assert done.stdout.count("qdisc tbf") == 4
    assert done.stdout.count("rate 100Mbit") == done.stdout.count("rate 1Gbit") == 2
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout == before
