"""What is counted while a trace runs, from the end of the warm-up on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """A look at the mesh. `bottlenecks`: tokens a second by model; `evenness`: the bottleneck over the mean layer's
    throughput, on average of the covered models; `room_used`: share of the lent memory that READY layers take."""

    at: float
    num_nodes: int
    covered_share: float
    bottlenecks: dict[str, float]
    evenness: float
    room_used: float
    loaded_bytes: int
    lost_bytes: int


@dataclass(slots=True)
class Route:
    """A route that the router chose for a covered model; `tokens_per_second` of its slowest hop if it had no other
    work."""

    model_id: str
    hops: int
    tokens_per_second: float


@dataclass(slots=True)
class Tally:
    """Bytes are of weights. `refilled_bytes`: loads of layers that nobody served when they were done;
    `last_lost_bytes`: what departed as the last replica. `thrash_bytes`: loads of layers that the same process had
    loaded before; `orders` by kind and reason."""

    orders: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    departures: int = 0
    joins: int = 0
    loaded_bytes: int = 0
    lost_bytes: int = 0
    refilled_bytes: int = 0
    last_lost_bytes: int = 0
    dropped_bytes: int = 0
    thrash_bytes: int = 0
    node_seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
