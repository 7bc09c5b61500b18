"""A route as a pipeline: how long a round of decoding takes, and a prompt.

::

    entry            n1              n2
    [layers|head] -> [layers] -----> [layers]
          ^------------ back -----------'

Sessions travel in as many frames as there are stages. A round brings each session a token: it is over no sooner than
the slowest frame is back, and no sooner than whatever all frames pass (a node, a link, the cores and the memory of a
machine) has served them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshnet.chunks import MAX_CHUNKS_IN_FLIGHT, chunk_tokens
from meshnet.estimate.hardware import HeadCosts, StageCosts

BYTES_PER_ELEMENT = 2

Resource = tuple[str, str]
"""What frames take turns at: its kind, and whose it is."""
_Taken = defaultdict[Resource, float]


@dataclass(frozen=True, slots=True)
class Way:
    """From one node to the next: seconds that a byte travels, and bytes a second (None: as many as you like)."""

    seconds: float = 0.0
    bytes_per_second: float | None = None

    def sending(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0


@dataclass(frozen=True, slots=True)
class FrameCosts:
    """Seconds beside layers and head. Of the entry node: `step` for each frame and `row` for each of its rows. Of any
    two nodes: `hop` for a frame from the one to the other, half of it on either. `aside`: of the entry node's machine,
    for each token, but without anything waiting for it: what gateway and streams take."""

    step: float = 0.0
    row: float = 0.0
    hop: float = 0.0
    aside: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What nodes on one machine share: cores, as many nodes as can compute at full speed at once, and the memory
    that all of them together read. None: it has plenty."""

    cores: float | None = None
    bytes_per_second: float | None = None


UNSHARED = Machine()


@dataclass(frozen=True, slots=True)
class Stage:
    node_id: str
    machine: str
    costs: StageCosts


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One route. `ways[i]` leads from stage i to the next, `back` from the last to the first; a route of one stage has
    neither."""

    stages: tuple[Stage, ...]
    head: HeadCosts
    hidden_size: int
    ways: tuple[Way, ...] = ()
    back: Way | None = None
    frames: FrameCosts = FrameCosts()

    @property
    def hops(self) -> tuple[Way, ...]:
        """All that a frame travels until it is back."""
        return (*self.ways, self.back) if self.back else ()

    def bytes(self, num_positions: float) -> float:
        return num_positions * self.hidden_size * BYTES_PER_ELEMENT

    def shares(self, num_streams: int) -> list[int]:
        """Rows of the frames that so many sessions travel in."""
        count = min(len(self.stages), num_streams)
        return [num_streams // count + (index < num_streams % count) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of all streams together, and what keeps it from being higher."""

    tokens_per_second: float
    limit: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """`first_token_seconds`: until the first new token is there; `seconds`: until the prompt has passed all layers."""

    num_tokens: int
    seconds: float
    first_token_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(slots=True)
class _Demand:
    """A route's share of the streams: what it can do alone, and seconds of each resource for one of its tokens."""

    rate: float
    seconds: dict[Resource, float] = field(default_factory=dict)


def stage_seconds(stage: Stage, rows: int, cached: float) -> float:
    """A decoding step."""
    return stage.costs.decode.at(rows) + rows * cached * stage.costs.decode_cached


def frame_seconds(pipeline: Pipeline, rows: int, cached: float) -> float:
    """From a token to the next, of sessions that travel together and meet nobody."""
    layers = sum(stage_seconds(stage, rows, cached) for stage in pipeline.stages)
    hops = sum(pipeline.frames.hop + way.seconds + way.sending(pipeline.bytes(rows)) for way in pipeline.hops)
    return layers + hops + _choosing_seconds(pipeline, rows)


def tokens_per_second(
    pipelines: Sequence[Pipeline], machines: dict[str, Machine], num_streams: int, cached: float
) -> Rate:
    """Of so many streams that decode at once, spread evenly over the routes, each with so many tokens cached."""
    shares = [num_streams // len(pipelines) + (i < num_streams % len(pipelines)) for i in range(len(pipelines))]
    demands = [
        _demand(pipeline, machines, share, cached) for pipeline, share in zip(pipelines, shares, strict=True) if share
    ]
    limit = "time of a round"
    resources = {resource for demand in demands for resource in demand.seconds}
    for _ in resources:
        taken = {r: sum(demand.rate * demand.seconds.get(r, 0.0) for demand in demands) for r in resources}
        worst = max(sorted(taken), key=lambda resource: taken[resource])
        if taken[worst] <= 1 + 1e-9:
            break
        limit = " ".join(worst)
        for demand in demands:
            if worst in demand.seconds:
                demand.rate /= taken[worst]
    return Rate(sum(demand.rate for demand in demands), limit)


def prefill(pipeline: Pipeline, machines: dict[str, Machine], num_tokens: int) -> Prefill:
    """A prompt on an idle route, in chunks that follow each other through the stages."""
    chunk = chunk_tokens(num_tokens, len(pipeline.stages))
    sizes = [min(chunk, num_tokens - start) for start in range(0, num_tokens, chunk)]
    stage_free, link_free = [0.0] * len(pipeline.stages), [0.0] * len(pipeline.ways)
    answer = sum(way.seconds + pipeline.frames.hop for way in pipeline.ways)
    done: list[float] = []
    for index, size in enumerate(sizes):
        # An answer to a chunk passes all hops back before the entry node sends another in its place.
        moment = done[index - MAX_CHUNKS_IN_FLIGHT] + answer if index >= MAX_CHUNKS_IN_FLIGHT else 0.0
        for at, stage in enumerate(pipeline.stages):
            moment = max(moment, stage_free[at]) + chunk_seconds(stage, size, index * chunk)
            stage_free[at] = moment
            if at < len(pipeline.ways):
                way = pipeline.ways[at]
                link_free[at] = max(moment, link_free[at]) + way.sending(pipeline.bytes(size))
                moment = link_free[at] + way.seconds + pipeline.frames.hop
        done.append(moment)
    seconds = max(done[-1], _shared_seconds(pipeline, machines, sizes))
    back = pipeline.back
    returning = back.seconds + pipeline.frames.hop + back.sending(pipeline.bytes(1)) if back else 0.0
    return Prefill(num_tokens, seconds, seconds + returning + _choosing_seconds(pipeline, 1))


def chunk_seconds(stage: Stage, num_tokens: int, position: int) -> float:
    """Of a chunk behind so many tokens; a token sees half of its own chunk on average."""
    return stage.costs.chunk.at(num_tokens) + num_tokens * (position + num_tokens / 2) * stage.costs.chunk_cached


def _choosing_seconds(pipeline: Pipeline, rows: int) -> float:
    frames = pipeline.frames
    return pipeline.head.seconds.at(rows) + frames.step + rows * frames.row


def _shared_seconds(pipeline: Pipeline, machines: dict[str, Machine], sizes: Sequence[int]) -> float:
    """What the machines take for all chunks if their nodes work at once."""
    taken: _Taken = defaultdict(float)
    for stage in pipeline.stages:
        machine = machines.get(stage.machine, UNSHARED)
        busy = sum(chunk_seconds(stage, size, index * sizes[0]) for index, size in enumerate(sizes))
        _take(taken, stage.machine, machine, busy, len(sizes) * stage.costs.step_bytes)
    return max(taken.values(), default=0.0)


def _demand(pipeline: Pipeline, machines: dict[str, Machine], num_streams: int, cached: float) -> _Demand:
    shares = pipeline.shares(num_streams)
    taken: _Taken = defaultdict(float)
    for rows in shares:
        _take_frame(taken, pipeline, machines, rows, cached)
    rate = sum(rows / frame_seconds(pipeline, rows, cached) for rows in shares)
    return _Demand(rate, {resource: seconds / num_streams for resource, seconds in taken.items() if seconds})


def _take_frame(taken: _Taken, pipeline: Pipeline, machines: dict[str, Machine], rows: int, cached: float) -> None:
    for index, stage in enumerate(pipeline.stages):
        machine = machines.get(stage.machine, UNSHARED)
        busy = stage_seconds(stage, rows, cached) + (pipeline.frames.hop if pipeline.back else 0.0)
        read = stage.costs.step_bytes + rows * cached * stage.costs.cached_bytes
        if index == 0:
            busy += _choosing_seconds(pipeline, rows)
            read += pipeline.head.step_bytes
            _take(taken, stage.machine, machine, rows * pipeline.frames.aside, 0.0)
        taken["steps of", stage.node_id] += busy
        _take(taken, stage.machine, machine, busy, read)
    for index, way in enumerate(pipeline.hops):
        sender, receiver = pipeline.stages[index], pipeline.stages[(index + 1) % len(pipeline.stages)]
        taken["link from", sender.node_id] += way.sending(pipeline.bytes(rows))
        taken["link to", receiver.node_id] += way.sending(pipeline.bytes(rows))


def _take(taken: _Taken, name: str, machine: Machine, busy: float, read: float) -> None:
    if machine.cores:
        taken["cores of", name] += busy / machine.cores
    if machine.bytes_per_second:
        taken["memory of", name] += read / machine.bytes_per_second
