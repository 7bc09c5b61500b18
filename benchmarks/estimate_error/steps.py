"""Times steps of SmolLM2-135M whole on one thread, in processes of their own, alone or several at once.

A worker reads commands, one a line, and answers each with the median of seconds: `decode ROWS SECONDS` (of sessions
with `CACHED` tokens), `chunk TOKENS SECONDS`, `head ROWS SECONDS`; SECONDS say how long it goes on. Layers and head
take turns, as they do in a mesh: the last cache would hold all of a head that is asked for again and again.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType

from benchmarks.shard_step import MODEL, prompt, run
from benchmarks.streams import NEW_TOKENS, PROMPT_TOKENS
from meshnet.chunks import CHUNK_TOKENS
from meshnet.model import Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import SampleWork, Sampling, ShardSpec, Work
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from tests.processes import ROOT
from tests.smollm2 import smollm2_path

# As benchmarks.streams has it in the middle of an answer.
CACHED = PROMPT_TOKENS + NEW_TOKENS // 2
MAX_ROWS = 16
KV_TOKENS = (MAX_ROWS + 1) * 2 * CHUNK_TOKENS
STOP_SECONDS = 10.0


class Worker(AbstractContextManager["Worker"]):
    """A process that times steps."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.estimate_error.steps"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def ask(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with code {self._process.wait(STOP_SECONDS)}")
        return line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        # It has nothing to put in order, and torch takes its time to leave.
        self._process.kill()
        self._process.wait(STOP_SECONDS)


def ask_all(workers: Sequence[Worker], command: str) -> float:
    """Seconds of a step while all workers run such steps: the mean of what they say."""
    for worker in workers:
        worker.ask(command)
    return statistics.mean([worker.answer() for worker in workers])


def main() -> None:
    files = ModelFiles(MODEL, smollm2_path())
    manifest = read_manifest(files)
    layers = manifest.all_layers
    executor = TorchExecutor({MODEL: files}, threads=1)
    shard = executor.load(ShardSpec(manifest, layers, Quantization.BFLOAT16, KV_TOKENS), lambda done, total: None)
    executor.attach(shard)
    for session in range(MAX_ROWS):
        run(executor, [prompt(session, 0, CACHED, layers, 0)])

    def works(kind: str, count: int) -> tuple[list[Work], list[Work]]:
        """What is timed, and what runs between."""
        if kind == "chunk":
            return [prompt(MAX_ROWS, 0, count, layers, 1)], []
        decode: list[Work] = [prompt(session, CACHED, 1, layers, 1) for session in range(count)]
        head: list[Work] = [SampleWork(MODEL, output, Sampling(), 0.5) for output in run(executor, decode)]
        return (decode, head) if kind == "decode" else (head, decode)

    print("ready", flush=True)
    for line in sys.stdin:
        kind, count, seconds = line.split()
        timed, between = (partial(run, executor, batch) for batch in works(kind, int(count)))
        print(_median(timed, between, float(seconds)), flush=True)


def _median(step: Callable[[], object], between: Callable[[], object], seconds: float) -> float:
    step()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while not times or time.perf_counter() < deadline:
        between()
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
