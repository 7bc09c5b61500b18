"""The cells of the matrix: one fault each, at one moment of some streams, and what must be seen of it."""

from __future__ import annotations

import itertools
import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, get_args

from tests.e2e.streams import Streams, streams
from tests.e2e.tiny import VOCAB_SIZE
from tests.faults.behaviour import PASS, RESET, STALL, Behaviour
from tests.faults.faulty_mesh import FaultyMesh
from tests.faults.proxy import Proxy
from tests.parity import Reference, check_emitted
from tests.processes import wait_until

Place = Literal["first", "middle", "last", "entry", "tracker"]
Phase = Literal["prefill", "first-token", "mid-decode", "last-token"]
Fault = Literal["kill", "stop", "reset", "stall", "corrupt"]

NUM_SESSIONS = (1, 8)
# Of three stages of two layers each.
LAYER = {"first": 0, "entry": 0, "middle": 2, "last": 4}
# The first stage is the entry node: a process dies once. What differs is which of its connections fail.
SAME = {("first", "kill"), ("first", "stop"), ("entry", "corrupt")}
PROMPT_TOKENS = {"prefill": 3000, "first-token": 3000, "mid-decode": 40, "last-token": 40}
NEW_TOKENS = {"prefill": 40, "first-token": 40, "mid-decode": 200, "last-token": 40}
# Each way, while a fault waits for a prompt to be under way.
PREFILL_DELAY = 0.15
CORRUPT = Behaviour(corrupts=3)
CORRUPT_GRPC = Behaviour(corrupts_anywhere=3)
# Over thousands of tokens some are nearly even. A token that was computed from something else is fifty steps off.
TOLERATED_STEPS = 8.0
# Connections come, and stay in pools for a minute; what leaks grows with every cell.
FILES_TO_SPARE = 128
IDLE_SECONDS = 30.0
_LOG_TIME = r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*"
_NOTICED = re.compile(_LOG_TIME + r"(?:generation \S+ goes on behind|entry node \S+ left a generation)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cell:
    place: Place
    phase: Phase
    fault: Fault
    num_sessions: int

    def __str__(self) -> str:
        return f"{self.place}/{self.phase}/{self.fault}/{self.num_sessions}"


def all_cells() -> list[Cell]:
    """In an order in which the same node is not lost twice in a row."""
    return [
        Cell(place, phase, fault, count)
        for phase, fault, count, place in itertools.product(
            get_args(Phase), get_args(Fault), NUM_SESSIONS, get_args(Place)
        )
        if (place, fault) not in SAME
    ]


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What streams got when nothing happened, and how: seconds to their first token, and from one to the next."""

    tokens: list[list[int]]
    first_seconds: float
    step_seconds: float


@dataclass(slots=True)
class Outcome:
    """`pause_seconds`: the longest that a stream had to wait for a token beyond what it waits undisturbed.
    `noticed_seconds`: from the fault until a log first says that a generation goes on elsewhere, None if none does.
    `failure`: empty if all is as it must be. `flips`: tokens that are others than undisturbed and right all the same.
    """

    cell: Cell
    pause_seconds: float | None = None
    noticed_seconds: float | None = None
    flips: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failure(self) -> str:
        return "; ".join(self.failures)


class Matrix:
    """Runs cells on one mesh, one after the other. `reference` judges tokens that are not those of before."""

    def __init__(self, faulty: FaultyMesh, reference: Reference) -> None:
        self._faulty = faulty
        self._reference = reference
        self._undisturbed: dict[tuple[int, int, int], Undisturbed] = {}
        self._files: dict[int, int] = {}

    def run(self, cell: Cell) -> Outcome:
        """Whatever happens, the mesh is whole and healthy after it, or AssertionError says that it is not."""
        faulty, outcome, began = self._faulty, Outcome(cell), time.monotonic()
        undisturbed = self._known(cell)
        self._files |= {pid: count for pid, count in faulty.num_files().items() if pid not in self._files}
        marks = faulty.log_marks()
        try:
            self._disturb(cell, undisturbed, outcome)
        except Exception as error:
            outcome.failures.append(short(error))
        faulty.heal()
        outcome.failures += faulty.unexpected(marks)
        self._check_no_leak(cell, outcome)
        faulty.start_missing()
        faulty.wait_until_whole()
        outcome.seconds = time.monotonic() - began
        return outcome

    def _disturb(self, cell: Cell, undisturbed: Undisturbed, outcome: Outcome) -> None:
        faulty, prompts = self._faulty, prompts_of(cell)
        injection = Injection(faulty, cell)
        if is_long(cell):
            for fronts in faulty.fronts.values():
                fronts.forward.behave(Behaviour(delay=PREFILL_DELAY))
        new_tokens = NEW_TOKENS[cell.phase]
        with streams(faulty.mesh.gateway_url, faulty.model_id, prompts, new_tokens, injection.at_token) as clients:
            injection.aim(clients)
            try:
                tokens = clients.tokens()
            finally:
                if injection.at:
                    outcome.pause_seconds = _pause(clients, cell, injection.at, undisturbed)
                    at = noticed_at(faulty, injection.wall)
                    outcome.noticed_seconds = None if at is None else at - injection.wall
        assert injection.at, "the streams ended before the fault"
        assert not injection.is_late, f"the fault came late: {injection.is_late}"
        outcome.flips = self._check_tokens(prompts, tokens, undisturbed.tokens)

    def _check_tokens(self, prompts: list[list[int]], tokens: list[list[int]], wanted: list[list[int]]) -> int:
        flips = 0
        for prompt, got, before in zip(prompts, tokens, wanted, strict=True):
            if got != before:
                self._check_right(prompt, got)
                flips += sum(a != b for a, b in zip(got, before, strict=True))
        return flips

    def _check_right(self, prompt: list[int], tokens: list[int]) -> None:
        # In one pass, which takes other kernels than a step at a time; in these tokens that is far from a wrong one.
        logits = self._reference.logits([*prompt, *tokens[:-1]])
        check_emitted(logits[len(prompt) - 1 :], tokens, TOLERATED_STEPS)

    def _check_no_leak(self, cell: Cell, outcome: Outcome) -> None:
        faulty = self._faulty
        dead = faulty.dead()
        if cell.fault != "kill" and dead:
            outcome.failures.append(f"ended: {', '.join(dead)}")
        faulty.bury()
        try:
            faulty.wait_until_idle(IDLE_SECONDS)
            wait_until(lambda: not self._too_many_files(), IDLE_SECONDS, "files are closed", self._told_files)
        except (AssertionError, OSError) as error:
            outcome.failures.append(f"left over: {short(error)}")

    def _too_many_files(self) -> dict[int, int]:
        counts = self._faulty.num_files()
        return {pid: n for pid, n in counts.items() if n > self._files.get(pid, n) + FILES_TO_SPARE}

    def _told_files(self) -> str:
        return f"open files {self._too_many_files()}, before {self._files}"

    def _known(self, cell: Cell) -> Undisturbed:
        key = PROMPT_TOKENS[cell.phase], NEW_TOKENS[cell.phase], cell.num_sessions
        if key not in self._undisturbed:
            self._undisturbed[key] = self._measure(cell)
        return self._undisturbed[key]

    def _measure(self, cell: Cell) -> Undisturbed:
        faulty, prompts = self._faulty, prompts_of(cell)
        with streams(faulty.mesh.gateway_url, faulty.model_id, prompts, NEW_TOKENS[cell.phase]) as clients:
            tokens = clients.tokens()
        for prompt, got in zip(prompts, tokens, strict=True):
            self._check_right(prompt, got)
        first = max(arrivals[0] - clients.began for arrivals in clients.arrivals)
        faulty.wait_until_idle()
        return Undisturbed(tokens, first, statistics.median(_gaps(clients)))


class Injection:
    """Finds what is to fail, and makes it fail at the right moment: at a token of the first stream, or at once."""

    def __init__(self, faulty: FaultyMesh, cell: Cell) -> None:
        self._faulty = faulty
        self._cell = cell
        self._inflict: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._before = faulty.num_sessions()
        self.at: float | None = None
        """On the monotonic clock, once it has happened; `wall`: the same on the wall clock."""
        self.wall = 0.0
        self.is_late = ""

    @property
    def _at_token(self) -> int:
        """0: while the prompt is under way."""
        total = NEW_TOKENS[self._cell.phase]
        return {"prefill": 0, "first-token": 1, "mid-decode": total // 2, "last-token": total - 1}[self._cell.phase]

    def aim(self, clients: Streams) -> None:
        """Finds the node that has the streams. From then on the fault happens at its token."""
        inflict = self._found(clients)
        with self._lock:
            self._inflict = inflict
            if self._num_tokens > self._at_token:
                self.is_late = f"{self._num_tokens} tokens were there"
            if self._num_tokens >= self._at_token:
                self._act()

    def at_token(self, index: int, count: int) -> None:
        if index:
            return
        with self._lock:
            self._num_tokens = count
            if self._inflict and not self.at and count >= self._at_token:
                self._act()

    def _act(self) -> None:
        assert self._inflict
        self.at, self.wall = time.monotonic(), time.time()
        self._inflict()
        if is_long(self._cell):
            # What made the prompt slow.
            for fronts in self._faulty.fronts.values():
                if fronts.forward.behaviour.delay:
                    fronts.forward.behave(PASS)

    def _found(self, clients: Streams) -> Callable[[], None]:
        place, faulty = self._cell.place, self._faulty
        if place == "tracker":
            return self._on_process("tracker", faulty.tracker_front, CORRUPT_GRPC)
        node_id = faulty.wait_until_busy(LAYER[place], self._before, clients)
        fronts = faulty.fronts[node_id]
        return self._on_process(node_id, fronts.prompts if place == "entry" else fronts.forward, CORRUPT)

    def _on_process(self, name: str, front: Proxy, corrupt: Behaviour) -> Callable[[], None]:
        faulty = self._faulty
        if self._cell.fault == "kill":
            return lambda: faulty.kill(name)
        if self._cell.fault == "stop":
            return lambda: faulty.stop(name)
        behaviour = {"reset": RESET, "stall": STALL, "corrupt": corrupt}[self._cell.fault]
        return lambda: front.behave(behaviour)


def noticed_at(faulty: FaultyMesh, since: float) -> float | None:
    """When a log first said after that time that a generation goes on elsewhere, on the wall clock."""
    times = [
        datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        for process in faulty.processes().values()
        for found in _NOTICED.finditer(process.output())
    ]
    # Logs round down.
    return min((at for at in times if at > since - 0.002), default=None)


def is_long(cell: Cell) -> bool:
    """Whether its prompts take a while."""
    return cell.phase in ("prefill", "first-token")


def prompts_of(cell: Cell) -> list[list[int]]:
    """Always the same for cells that have as many sessions and as long prompts."""
    length = PROMPT_TOKENS[cell.phase]
    draw = random.Random(length + cell.num_sessions)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length - i)] for i in range(cell.num_sessions)]


def _gaps(clients: Streams) -> list[float]:
    return [b - a for arrivals in clients.arrivals for a, b in itertools.pairwise(arrivals)]


def _pause(clients: Streams, cell: Cell, at: float, undisturbed: Undisturbed) -> float:
    """Of the gaps that end behind the fault the longest, without what it would have been; a stream that ended in one
    has it until now."""
    now, longest = time.monotonic(), 0.0
    for arrivals in clients.arrivals:
        times: Sequence[float] = (clients.began, *arrivals)
        if len(arrivals) < NEW_TOKENS[cell.phase]:
            times = (*times, now)
        for number, (before, after) in enumerate(itertools.pairwise(times)):
            usual = undisturbed.step_seconds if number else undisturbed.first_seconds
            if after > at:
                longest = max(longest, after - before - usual)
    return longest


def short(error: BaseException) -> str:
    """Its kind, and what it says first."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return f"{type(error).__name__}: {' | '.join(lines[:2])[:160]}"


def chosen(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Those whose name fits one of the patterns, in which * stands for any part; all if there is no pattern."""
    fits = [re.compile(re.escape(pattern).replace(r"\*", "[^/]*")) for pattern in patterns]
    return [cell for cell in cells if not fits or any(fit.fullmatch(str(cell)) for fit in fits)]
