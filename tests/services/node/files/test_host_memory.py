"""Free memory within control groups, on made-up trees of files as Linux has them, and in a real group."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.node.files.host_memory import free_host_bytes, group_rooms

GB, MB = 10**9, 10**6
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
UNLIMITED = 9223372036854771712


def machine(root: Path, membership: str, mounts: str) -> Path:
    own = root / "proc/self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(membership)
    (own / "mountinfo").write_text(f"23 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mounts}\n")
    return root


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_the_tightest_group_counts_and_cached_files_do_not(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/user.slice/app.scope\n", V2_MOUNT.format(root="/"))
    top = root / "sys/fs/cgroup"
    group(top)
    statistics = f"anon {700 * MB}\ninactive_file {200 * MB}\nactive_file {100 * MB}\nslab_reclaimable 0"
    group(top / "user.slice", max=2 * GB, high="max", current=1900 * MB, stat=f"inactive_file {1000 * MB}")
    group(top / "user.slice/app.scope", max="max", high=1500 * MB, current=GB, stat=statistics)
    assert group_rooms(root) == [800 * MB, 1100 * MB]
    assert free_host_bytes(root) == min(800 * MB, psutil.virtual_memory().available)


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", V2_MOUNT.format(root="/"))
    group(root / "sys/fs/cgroup", max=GB, high=500 * MB, current=600 * MB, stat="anon 1")
    assert group_rooms(root) == [-100 * MB]
    assert free_host_bytes(root) == 0


def test_version_1_counts_what_children_cache(tmp_path: Path) -> None:
    root = machine(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/pod/c\n0::/\n", V1_MOUNT.format(root="/"))
    top = root / "sys/fs/cgroup/memory"
    group(top, limit_in_bytes=UNLIMITED, usage_in_bytes=9 * GB)
    group(
        top / "pod", limit_in_bytes=3 * GB, usage_in_bytes=GB, stat=f"inactive_file 5\ntotal_inactive_file {300 * MB}"
    )
    group(top / "pod/c", limit_in_bytes=2 * GB, usage_in_bytes=GB, stat="total_active_file 7")
    assert group_rooms(root) == [GB + 7, 2300 * MB, UNLIMITED - 9 * GB]


@pytest.mark.parametrize(
    ("path", "shown"),
    # Docker without a namespace of its own; with one; and a process that was moved out of what is mounted.
    [("/docker/abc", "/docker/abc"), ("/", "/"), ("/../other", "/"), ("/elsewhere", "/docker/abc")],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_that_sees_its_own_group_only(tmp_path: Path, path: str, shown: str, version: int) -> None:
    if version == 1:
        root = machine(tmp_path, f"4:memory:{path}\n", V1_MOUNT.format(root=shown))
        group(root / "sys/fs/cgroup/memory", limit_in_bytes=2 * GB, usage_in_bytes=GB)
    else:
        root = machine(tmp_path, f"0::{path}\n", V2_MOUNT.format(root=shown))
        group(root / "sys/fs/cgroup", max=2 * GB, current=GB)
    assert group_rooms(root) == [GB]


@pytest.mark.parametrize("text", ["", "0::/\n", "garbage\n4:memory\n:::\n"])
def test_without_groups_the_machine_counts(tmp_path: Path, text: str) -> None:
    root = machine(tmp_path, text, "x\n35 31 - cgroup2\n")
    assert group_rooms(root) == []
    assert free_host_bytes(root) > 0


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A memory group inside that of this process, with a limit of 512 MiB."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    v1 = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
    v2 = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/")
    top = f"/sys/fs/cgroup/memory{v1}" if v1 else f"/sys/fs/cgroup{v2}"
    folder = Path(top) / f"meshnet-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    try:
        limit = folder / ("memory.limit_in_bytes" if v1 else "memory.max")
        try:
            limit.write_text(str(512 << 20))
        except OSError as error:
            pytest.skip(f"no limit can be set for a control group here: {error}")
        yield folder
    finally:
        folder.rmdir()


def test_a_real_group_limits_what_is_free(limited_group: Path) -> None:
    program = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
        "from services.node.files.host_memory import free_host_bytes; print(free_host_bytes());"
        "held = bytearray(os.urandom(1)) * (100 << 20); print(free_host_bytes())"
    )
    command = [sys.executable, "-c", program, str(limited_group / "cgroup.procs")]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=True)
    before, after = map(int, outcome.stdout.split())
    assert before <= 512 << 20
    assert 90 << 20 <= before - after <= 120 << 20
