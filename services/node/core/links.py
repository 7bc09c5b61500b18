"""The ways from this node to others: which to measure next, and what is known of each. Pure; times in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshnet.topology import Link, Topology

# The id of the tracker among the targets.
TRACKER = ""
MAX_LINKS = 16
# Of the nodes that this one sends frames to, and of others.
MAX_USED = 8
MAX_OTHERS = 4
# The others change in turn.
TURN_SECONDS = 600.0
EVERY_SECONDS = 60.0
# A throughput that could not be measured yet is tried again sooner.
AGAIN_SECONDS = 10.0
NUM_RECENT = 5
SMOOTHING = 0.3
MIN_PAUSE_SECONDS = 0.2
# Measuring takes at most one part in this many of the time.
DUTY = 20
FIRST_PAYLOAD_BYTES = 64 << 10
MAX_PAYLOAD_BYTES = 1 << 20
# A payload keeps the link busy for about as long.
PAYLOAD_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to measure: the round trip to a node (empty: to the tracker), and how long `payload_bytes` take, if any."""

    node_id: str
    payload_bytes: int


@dataclass(slots=True)
class _Record:
    due_at: float
    rtts: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    bytes_per_second: float | None = None


class LinkTable:
    """The links of one node. One measurement at a time: `next` says which, `measured` or `failed` how it went."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._records: dict[str, _Record] = {}
        self._order: list[str] = []
        self._not_before = 0.0

    def next(self, topology: Topology, used: Sequence[str], now: float, *, busy: bool) -> Measurement | None:
        """What to measure now, if anything. `used`: nodes that this one sends frames to, the latest first. While it is
        `busy` with frames, only the round trip is measured."""
        targets = self._targets(topology, used, now)
        self._forget(topology, targets)
        if now < self._not_before:
            return None
        for node_id in targets:
            record = self._records.setdefault(node_id, _Record(now))
            if record.due_at <= now:
                return Measurement(node_id, 0 if busy else _payload_bytes(record.bytes_per_second))
        return None

    def measured(
        self, measurement: Measurement, rtt_seconds: float, payload_seconds: float | None, took: float, now: float
    ) -> bool:
        """It has ended now and took this long in all. Returns whether the link is new."""
        record = self._ended(measurement, took, now)
        if record is None:
            return False
        is_new = not record.rtts
        record.rtts.append(rtt_seconds)
        if payload_seconds is not None:
            # What the payload took beyond an empty message; no link is infinitely fast.
            seconds = max(payload_seconds - rtt_seconds, payload_seconds / 10, 1e-9)
            rate, before = measurement.payload_bytes / seconds, record.bytes_per_second
            record.bytes_per_second = rate if before is None else before + SMOOTHING * (rate - before)
        if record.bytes_per_second is None:
            record.due_at = now + AGAIN_SECONDS
        return is_new

    def failed(self, measurement: Measurement, took: float, now: float) -> None:
        """The link is not reported until it can be measured again."""
        record = self._ended(measurement, took, now)
        if record:
            record.rtts.clear()
            record.bytes_per_second = None

    def links(self) -> tuple[Link, ...]:
        """What is known: the tracker first, then the nodes that frames go to, then others. Three digits are plenty."""
        return tuple(
            Link(node_id, _rounded(min(record.rtts)), record.bytes_per_second and _rounded(record.bytes_per_second))
            for node_id in self._order
            if (record := self._records.get(node_id)) and record.rtts
        )[:MAX_LINKS]

    def bytes_per_second(self, node_id: str) -> float | None:
        """Of the way to a node, if it has been measured."""
        record = self._records.get(node_id)
        return record.bytes_per_second if record else None

    def _targets(self, topology: Topology, used: Sequence[str], now: float) -> list[str]:
        ids = sorted(topology.nodes)
        here = topology.nodes.get(self._node_id)
        frequent = [node_id for node_id in used if node_id in topology.nodes][:MAX_USED]
        # Beginning behind itself, so that not all nodes measure the same ones.
        others = [i for i in ids if i > self._node_id] + [i for i in ids if i < self._node_id]
        others = [i for i in others if i not in frequent and here and topology.nodes[i].stub == here.stub]
        first = int(now // TURN_SECONDS) * MAX_OTHERS
        turn = [others[(first + i) % len(others)] for i in range(min(MAX_OTHERS, len(others)))]
        return [TRACKER, *frequent, *turn]

    def _forget(self, topology: Topology, targets: Sequence[str]) -> None:
        """Nodes that are gone, and of those that are no longer measured the ones that were so the longest ago."""
        former = [i for i in self._order if i not in targets and i in topology.nodes and i in self._records]
        self._order = [*targets, *former][:MAX_LINKS]
        self._records = {i: record for i, record in self._records.items() if i in self._order}

    def _ended(self, measurement: Measurement, took: float, now: float) -> _Record | None:
        self._not_before = now + max(took * (DUTY - 1), MIN_PAUSE_SECONDS)
        record = self._records.get(measurement.node_id)
        if record:
            record.due_at = now + EVERY_SECONDS
        return record


def _payload_bytes(bytes_per_second: float | None) -> int:
    if bytes_per_second is None:
        return FIRST_PAYLOAD_BYTES
    return max(FIRST_PAYLOAD_BYTES // 4, min(int(bytes_per_second * PAYLOAD_SECONDS), MAX_PAYLOAD_BYTES))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
