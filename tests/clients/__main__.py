"""Clients of others, as they come, against the gateway of a mesh of two nodes: SmolLM2-135M on one thread each.

    python -m tests.clients ~/clients                  # all of them
    python -m tests.clients ~/clients --only lm_eval

Each client is installed in a virtual environment of its own below the folder: 2 GB in all, most of it for lm_eval,
which brings torch. What a client prints is in its log there. Exits with 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.streams import KV_TOKENS, MODEL, specs
from tests.clients.environments import Environment
from tests.clients.evaluation import evaluate
from tests.clients.running import Gateway, command_llm, script
from tests.e2e.mesh import running_mesh
from tests.smollm2 import smollm2_path

# What each does with a gateway, in an environment with its packages. Returns what it has found, for people.
CLIENTS: dict[str, tuple[tuple[str, ...], Callable[[Environment, Gateway], str]]] = {
    "openai": (("openai",), script("openai_client.py")),
    "langchain-openai": (("langchain-openai",), script("langchain_client.py")),
    "litellm": (("litellm",), script("litellm_client.py")),
    "llm": (("llm",), command_llm),
    "lm_eval": (("lm_eval[api,hf]",), evaluate),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Where the environments are, or will be made.")
    parser.add_argument("--only", choices=CLIENTS, action="append", help="Repeatable. Default: all.")
    arguments = parser.parse_args()
    names: list[str] = arguments.only or list(CLIENTS)
    folder: Path = arguments.folder.expanduser().absolute()
    environments = {name: Environment(name, folder, CLIENTS[name][0]) for name in names}
    for environment in environments.values():
        environment.install()
    table, num_failed = Table("client", "version", "result", "what was done"), 0
    model = f"{MODEL}={smollm2_path()}"
    with running_mesh([model], specs(2), deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as mesh:
        for name, environment in environments.items():
            result, said = "ok", ""
            try:
                said = CLIENTS[name][1](environment, Gateway(mesh.gateway_url, MODEL, smollm2_path()))
                # Whatever a client has done, nothing of it may be left on a node.
                mesh.wait_until_idle()
            except Exception as error:  # the others have their turn all the same
                traceback.print_exc()
                result, said, num_failed = "FAILED", str(error), num_failed + 1
            table.add_row(name, environment.version, result, said)
    Console(width=130).print(table)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
