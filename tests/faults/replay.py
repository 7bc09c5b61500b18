"""What it costs to go on: a node of the route is killed, and the time to the next token is split up.

    python -m tests.faults.replay [--tokens 20,100,200] [--prompt 1500]

For each number of tokens that are there when the node dies: how long until its loss is noticed, how long until the next
token comes, and how long a plain prompt of the same tokens takes on the same mesh. One stream, tiny Llama, no reuse.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.e2e.streams import STREAM_SECONDS, streams
from tests.e2e.tiny import VOCAB_SIZE, save_tiny_llama
from tests.faults.cells import noticed_at
from tests.faults.faulty_mesh import FaultyMesh
from tests.faults.matrix import CONTEXT, three_stages
from tests.processes import wait_until

MIDDLE = 2
# Behind the token at which the node dies.
REST = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="20,100,200")
    parser.add_argument("--prompt", type=int, default=1500, help="Its tokens.")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHNET_CACHE_DIR"] = folder
        weights = save_tiny_llama(Path(folder) / "weights", context_length=CONTEXT, vocabulary=True)
        with three_stages(weights, console.print) as faulty:
            for count in map(int, arguments.tokens.split(",")):
                console.print(_told(faulty, arguments.prompt, count))


def _told(faulty: FaultyMesh, prompt_tokens: int, count: int) -> str:
    draw = random.Random(prompt_tokens + count)
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)]
    killed: list[float] = []
    with streams(faulty.mesh.gateway_url, faulty.model_id, [prompt], count + REST) as clients:
        node_id = faulty.wait_until_busy(MIDDLE, dict.fromkeys(faulty.mesh.nodes, 0), clients)
        wait_until(lambda: len(clients.arrivals[0]) >= count, STREAM_SECONDS, "so many tokens are there")
        faulty.kill(node_id)
        killed.append(time.time())
        (tokens,) = clients.tokens()
        arrivals = clients.arrivals[0]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    longest = max(range(len(gaps)), key=gaps.__getitem__)
    noticed = noticed_at(faulty, killed[0])
    assert noticed is not None, "nobody noticed it"
    # From one clock to the other.
    resumed = arrivals[longest + 1] - time.monotonic() + time.time()
    plain = min(_first_token(faulty, prompt + tokens[: longest + 1]) for _ in range(3))
    faulty.start_missing()
    faulty.wait_until_whole()
    replay = resumed - noticed
    return (
        f"{prompt_tokens} + {longest + 1} tokens: noticed after {noticed - killed[0]:.3f} s, next token {replay:.3f} s "
        f"later, a plain prompt {plain:.3f} s: {replay / plain:.2f} times"
    )


def _first_token(faulty: FaultyMesh, prompt: list[int]) -> float:
    with streams(faulty.mesh.gateway_url, faulty.model_id, [prompt], 1) as clients:
        clients.tokens()
        return clients.arrivals[0][0] - clients.began


if __name__ == "__main__":
    main()
