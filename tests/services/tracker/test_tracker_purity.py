from __future__ import annotations

import subprocess
import sys

from tests.processes import ROOT

CORES = (
    "beliefs",
    "placement",
    "registry",
    "directives",
    "view",
    "effects",
    "events",
    "mesh",
    "news",
    "remembered",
    "revisions",
    "settling",
)


def test_the_pure_cores_import_neither_the_event_loop_nor_grpc() -> None:
    imports = "; ".join(f"import services.tracker.{name}" for name in CORES)
    code = f"{imports}; import sys; print(sorted({{'asyncio', 'grpc', 'torch'}} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
