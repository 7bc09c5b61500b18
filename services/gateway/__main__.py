"""The gateway process: `meshnet gateway`, or `python -m services.gateway`."""

from __future__ import annotations

import os
import sys

# Where torch is installed too, transformers would import it: hundreds of megabytes for nothing that is used here.
sys.modules["torch"] = None  # type: ignore[assignment]
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from meshnet.service import run_process  # noqa: E402
from services.gateway.process import app  # noqa: E402

if __name__ == "__main__":
    run_process(lambda: app(prog_name="meshnet gateway"))
