"""What a generation costs that goes on over another route, against a prompt of as many tokens.

    python -m benchmarks.replay

SmolLM2-135M in bfloat16 on two nodes of one thread each. The seconds to the next token of a text whose last tokens were
generated before (as when a hop was lost behind them), and of the same text as a prompt; asked in turn, so that what
else the machine does is the same for both.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import uuid
from dataclasses import replace

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.streams import KV_TOKENS, MODEL, REQUEST_SECONDS, specs
from meshnet.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.mesh import running_mesh
from tests.smollm2 import smollm2_path

VOCABULARY = 40_000
# Tokens of the prompt, and generated ones behind it.
TEXTS = ((512, 32), (512, 128), (512, 512), (2048, 256), (64, 1024))


def first_token(stub: inference_pb2_grpc.InferenceStub, prompt: list[int], num_generated: int) -> float:
    """Seconds."""
    request = inference_pb2.GenerateRequest(
        request_id=str(uuid.uuid4()), model_id=MODEL, prompt_token_ids=prompt, max_new_tokens=1,
        num_generated=num_generated,
    )  # fmt: skip
    started = time.monotonic()
    events = list(stub.Generate(request, timeout=REQUEST_SECONDS))
    assert any(event.HasField("token_id") for event in events)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="Medians of so many.")
    repeats = parser.parse_args().repeats
    draw = random.Random(0)
    nodes = [replace(spec, options=("--no-prefix-reuse",)) for spec in specs(2)]
    table = Table("prompt", "generated", "as a prompt, s", "replayed, s", "ratio", title="To the next token, medians")
    with running_mesh([f"{MODEL}={smollm2_path()}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS) as mesh:
        (entry,) = mesh.topology().entry_nodes(MODEL)
        with grpc.insecure_channel(entry.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            first_token(stub, [1] * 256, 128)
            for num_prompt, num_generated in TEXTS:
                seen: dict[int, list[float]] = {0: [], num_generated: []}
                for _ in range(repeats):
                    for counted in seen:
                        text = [draw.randrange(VOCABULARY) for _ in range(num_prompt + num_generated)]
                        seen[counted].append(first_token(stub, text, counted))
                plain, replayed = (statistics.median(times) for times in seen.values())
                table.add_row(
                    str(num_prompt), str(num_generated), f"{plain:.2f}", f"{replayed:.2f}", f"{replayed / plain:.2f}"
                )
    Console().print(table)


if __name__ == "__main__":
    main()
