"""Hours of a mesh in minutes: streams that never end, a fault every ten seconds, and what must hold all the time.

    python -m tests.faults.soak [--minutes 30] [--seed N]

Six nodes of a tiny Llama, every layer twice, behind proxies; eight clients that ask for one answer after the other,
which are known from before the first fault. Faults come at random and leave one node of each layer alone. Checked:
every answer is right and in time, none fails; processes hold no more memory and no more files as time goes by; in the
end the mesh is what the tracker plans, and idle. Exit code 1, and what was seen, if one of these does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai
from rich.console import Console

from tests.e2e.admin import Admin
from tests.e2e.tiny import VOCAB_SIZE, save_tiny_llama, token_ids
from tests.e2e.watcher import holders
from tests.faults.behaviour import RESET, STALL, Behaviour
from tests.faults.cells import TOLERATED_STEPS, short
from tests.faults.faulty_mesh import FaultyMesh
from tests.faults.matrix import CONTEXT, MODEL, three_stages
from tests.faults.usage import Usage
from tests.parity import Reference, check_emitted

NUM_CLIENTS = 8
NUM_PROMPTS = 24
NEW_TOKENS = 160
FAULT_SECONDS = 10.0
# A fault that does not end by itself lasts so long.
LASTS_SECONDS = 5.0
# Of one request: what a hop's loss, a replacement and a busy machine may cost together.
DEADLINE_SECONDS = 120.0

PROXY_FAULTS = {
    "reset": RESET,
    "stall": STALL,
    "corrupt": Behaviour(corrupts=10),
    "delay": Behaviour(delay=0.05),
    "refuse": Behaviour(refuses=True),
    "cut": Behaviour(cuts_after=5000),
    "duplicate": Behaviour(duplicates=3),
    "reorder": Behaviour(reorders=0.5),
}
NODE_FAULTS = ("kill", "stop", *PROXY_FAULTS)
TRACKER_FAULTS = ("kill", "stop", "reset", "stall")


@dataclass(slots=True)
class Seen:
    """What clients got, by thread-safe appends."""

    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_flips: int = 0


class Clients:
    """Each asks for a random prompt, checks what it gets, and goes on, until `stop`."""

    def __init__(self, gateway_url: str, answers: dict[tuple[int, ...], list[int]], reference: Reference) -> None:
        self._client = openai.OpenAI(
            base_url=f"{gateway_url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_SECONDS
        )
        self._answers = answers
        self._reference = reference
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.seen = Seen()
        self._threads: list[threading.Thread] = []

    def start(self, seed: int) -> None:
        for index in range(NUM_CLIENTS):
            thread = threading.Thread(target=self._run, args=(random.Random(seed + index),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """When each has its last answer."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * DEADLINE_SECONDS)
            if thread.is_alive():
                self.seen.faults.append("a client waits for its answer long after its deadline")
        self._client.close()

    def ask(self, prompt: list[int]) -> list[int]:
        chunks = self._client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return token_ids(" ".join(chunk.choices[0].text for chunk in chunks))

    def _run(self, draw: random.Random) -> None:
        prompts = list(self._answers)
        while not self._stopping.is_set():
            prompt, began = draw.choice(prompts), time.monotonic()
            try:
                self._check(prompt, self.ask(list(prompt)))
            except Exception as error:
                seconds = time.monotonic() - began
                self.seen.faults.append(f"{time.strftime('%X')} after {seconds:.1f} s: {short(error)}")
                # Answered at once, it would fail many times a second.
                self._stopping.wait(1.0)
            self.seen.seconds.append(time.monotonic() - began)
            if self.seen.seconds[-1] > DEADLINE_SECONDS:
                self.seen.faults.append(f"an answer took {self.seen.seconds[-1]:.1f} s")

    def _check(self, prompt: tuple[int, ...], tokens: list[int]) -> None:
        if tokens == self._answers[prompt]:
            return
        assert len(tokens) == NEW_TOKENS, f"{len(tokens)} tokens"
        with self._lock:
            logits = self._reference.logits([*prompt, *tokens[:-1]])
            check_emitted(logits[len(prompt) - 1 :], tokens, TOLERATED_STEPS)
            self.seen.num_flips += 1


class Chaos:
    """One fault after the other, never on the last healthy node of a layer."""

    def __init__(self, faulty: FaultyMesh, draw: random.Random, say: Callable[[str], object]) -> None:
        self._faulty = faulty
        self._draw = draw
        self._say = say
        self.num_faults = 0

    def one(self) -> None:
        """A fault, the time that it lasts, and its end. What was killed is started again."""
        self.num_faults += 1
        if self._draw.random() < 0.15:
            self._at("tracker", self._draw.choice(TRACKER_FAULTS))
        else:
            node_id = self._victim()
            if node_id is None:
                self._say("no layer can spare a node: nothing is done")
                return
            self._at(node_id, self._draw.choice(NODE_FAULTS))
        time.sleep(LASTS_SECONDS)
        self._faulty.heal()
        self._faulty.start_missing()

    def _at(self, name: str, fault: str) -> None:
        self._say(f"{time.strftime('%X')} {fault} {name}")
        if fault == "kill":
            self._faulty.kill(name)
        elif fault == "stop":
            self._faulty.stop(name)
        elif name == "tracker":
            self._faulty.tracker_front.behave(PROXY_FAULTS[fault])
        else:
            fronts = self._faulty.fronts[name]
            fronts.forward.behave(PROXY_FAULTS[fault])
            if fault in ("reset", "stall", "refuse"):
                fronts.prompts.behave(PROXY_FAULTS[fault])

    def _victim(self) -> str | None:
        """A node all of whose layers another one serves, too, that a route has proven."""
        topology = self._faulty.mesh.topology()
        alive = {i for i, node in topology.nodes.items() if node.alive}
        serving = [held & alive for held in holders(topology, MODEL)]
        spare = [
            node_id
            for node_id in sorted(alive & self._faulty.mesh.nodes.keys())
            if all(len(held - {node_id}) for held in serving)
        ]
        return self._draw.choice(spare) if spare else None


def soak(
    faulty: FaultyMesh, reference: Reference, seconds: float, seed: int, say: Callable[[str], object]
) -> list[str]:
    """Returns what was seen that must not be, nothing if all holds."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(5, 600))] for _ in range(NUM_PROMPTS)]
    clients = Clients(faulty.mesh.gateway_url, {}, reference)
    answers = {tuple(prompt): clients.ask(prompt) for prompt in prompts}
    for prompt, tokens in answers.items():
        check_emitted(reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :], tokens, TOLERATED_STEPS)
    clients = Clients(faulty.mesh.gateway_url, answers, reference)
    say(f"{len(answers)} answers are known; seed {seed}")
    chaos, usage, marks = Chaos(faulty, draw, say), Usage(faulty), faulty.log_marks()
    clients.start(seed)
    began = time.monotonic()
    failures: list[str] = []
    try:
        while (left := began + seconds - time.monotonic()) > 0:
            fault_at = time.monotonic()
            chaos.one()
            usage.sample()
            time.sleep(min(max(0.0, fault_at + FAULT_SECONDS - time.monotonic()), max(left, 0.0)))
    finally:
        clients.stop()
    seen = clients.seen
    say(f"{len(seen.seconds)} answers, the slowest in {max(seen.seconds):.1f} s; {chaos.num_faults} faults")
    say(f"{seen.num_flips} answers took another of two nearly even tokens")
    failures += seen.faults
    failures += faulty.unexpected(marks)
    failures += _settled(faulty)
    usage.sample()
    failures += usage.growth()
    say(usage.told())
    return failures


def _settled(faulty: FaultyMesh) -> list[str]:
    failures = []
    for what in (faulty.wait_until_whole, Admin(faulty.mesh).settle, faulty.wait_until_idle):
        try:
            what()
        except AssertionError as error:
            failures.append(short(error))
    return failures


def run(seconds: float, seed: int, folder: Path, say: Callable[[str], object]) -> list[str]:
    """On a mesh of its own, whose files are in the folder."""
    weights = save_tiny_llama(folder, context_length=CONTEXT, vocabulary=True)
    with three_stages(weights, say, reuse=True) as faulty:
        return soak(faulty, Reference(weights), seconds, seed, say)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="Of the faults; default: drawn anew.")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    os.environ["HF_HUB_OFFLINE"] = "1"
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHNET_CACHE_DIR"] = folder
        failures = run(arguments.minutes * 60, seed, Path(folder) / "weights", console.print)
    for failure in failures:
        console.print(f"FAILED: {failure}")
    console.print("all held" if not failures else f"{len(failures)} failures; seed {seed}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
