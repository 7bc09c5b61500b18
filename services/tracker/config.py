"""The tracker's configuration, built once at the edge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshnet.errors import InvalidRequest
from meshnet.model import KvPrecision, check_model_id
from meshnet.security.shared_secret import SharedSecret


@dataclass(frozen=True, slots=True)
class Config:
    """`host` and `port` (0: any free one) to listen on. `deploy`: models to serve as soon as a node has their files,
    with KV cache room for `kv_tokens` tokens (0: the context length) at `kv_precision`. `state`: file that outlives the
    process, if any.
    `suspect_seconds`: default is two and a half heartbeats. Raises InvalidRequest for what cannot work."""

    host: str
    port: int
    deploy: tuple[str, ...] = ()
    kv_tokens: int = 0
    lease_seconds: float = 15.0
    heartbeat_seconds: float = 3.0
    suspect_seconds: float | None = None
    state: Path | None = None
    kv_precision: KvPrecision = KvPrecision.BFLOAT16
    secret: SharedSecret | None = None

    def __post_init__(self) -> None:
        for model_id in self.deploy:
            check_model_id(model_id)
        if self.kv_tokens < 0:
            raise InvalidRequest(f"--kv-tokens is {self.kv_tokens}; it must not be negative")
        if not 0 < self.heartbeat_seconds < self.lease_seconds < float("inf"):
            raise InvalidRequest(
                f"--heartbeat ({self.heartbeat_seconds:g} s) must be above 0 and below --lease "
                f"({self.lease_seconds:g} s), or nodes are lost between two heartbeats"
            )

        if not self.heartbeat_seconds < self.suspect_after_seconds <= self.lease_seconds:
            raise InvalidRequest(
                f"--suspect ({self.suspect_after_seconds:g} s) must be above --heartbeat "
                f"({self.heartbeat_seconds:g} s) and not above --lease ({self.lease_seconds:g} s)"
            )

    @property
    def suspect_after_seconds(self) -> float:
        """By default two heartbeats must be overdue, the second by half its time: one late one is nothing."""
        if self.suspect_seconds is None:
            return min(2.5 * self.heartbeat_seconds, self.lease_seconds)
        return self.suspect_seconds

    @property
    def tick_seconds(self) -> float:
        """How often leases are looked at and counters published."""
        return min(1.0, self.lease_seconds / 4)

    @property
    def settle_seconds(self) -> float:
        """After a restart: by then each node has noticed (one heartbeat and the reconnect backoff) and is back."""
        return 2 * self.heartbeat_seconds + 2.0
