"""A load generator of others against the gateway of a mesh of two nodes: random prompts of 1024 tokens, 128 new ones.

    benchmarks/load/install.sh ~/load              # once: guidellm, in an environment of its own
    python -m benchmarks.load --env ~/load
    python -m benchmarks.load --env ~/peers --tool vllm    # `vllm bench serve`, from benchmarks/peers/install.sh

SmolLM2-135M in bfloat16 on nodes of one thread each. The tool is used as it comes, and what is printed is its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.load.tools import TOOLS, Load
from benchmarks.peers.save import save_tokenizer
from benchmarks.streams import KV_TOKENS, MODEL, specs
from tests.e2e.mesh import running_mesh
from tests.smollm2 import smollm2_path

TOOL_SECONDS = 1800.0
# Its tables are no narrower where there is no terminal.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, default="guidellm")
    parser.add_argument("--env", type=Path, required=True, help="Where install.sh has put the tool.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4, help="Requests at a time.")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    environment = (arguments.env / arguments.tool).expanduser()
    if not environment.is_dir():
        parser.error(f"{environment} is not there; benchmarks/load/install.sh makes it for guidellm")
    gguf = smollm2_path()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_mesh(
            [f"{MODEL}={gguf}"], specs(arguments.nodes), deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True
        ) as mesh,
    ):
        save_tokenizer(gguf, Path(folder))
        load = Load(
            mesh.gateway_url, MODEL, Path(folder), arguments.requests, arguments.streams,
            arguments.prompt_tokens, arguments.new_tokens,
        )  # fmt: skip
        command = TOOLS[arguments.tool](environment.absolute(), load)
        # Files that it writes where it is run are as good as none.
        ended = subprocess.run(
            command, cwd=folder, env={**os.environ, **ENVIRONMENT}, timeout=TOOL_SECONDS, check=False
        )
        mesh.wait_until_idle()
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
