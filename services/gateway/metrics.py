"""What the gateway tells Prometheus. Where it means the same, names are vLLM's, with `meshnet:` for `vllm:`.

Labels are bounded: models are those of the mesh, routes those of this server, statuses and reasons are few.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
ABORT, ERROR = "abort", "error"

_MODEL = ("model_name",)
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
_FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Metrics:
    """`clock` tells seconds from any start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.http = Counter(
            "meshnet:http_requests", "Answers, by route and status.", ("method", "route", "status"), registry=registry
        )
        self.finished = Counter(
            "meshnet:request_success", "Choices that ended, by reason.", (*_MODEL, "finished_reason"), registry=registry
        )
        self.running = Gauge(
            "meshnet:num_requests_running", "Choices that have had a token.", _MODEL, registry=registry
        )
        self.waiting = Gauge(
            "meshnet:num_requests_waiting", "Choices that wait for their first token.", _MODEL, registry=registry
        )
        self.prompt_tokens = Counter("meshnet:prompt_tokens", "Tokens of prompts.", _MODEL, registry=registry)
        self.cached_tokens = Counter(
            "meshnet:prefix_cache_hits", "Tokens of prompts that were not computed again.", _MODEL, registry=registry
        )
        self.generation_tokens = Counter("meshnet:generation_tokens", "Tokens generated.", _MODEL, registry=registry)
        self.first_token_seconds = Histogram(
            "meshnet:time_to_first_token_seconds",
            "From a request's arrival to the first token of a choice.",
            _MODEL,
            buckets=_FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self.token_seconds = Histogram(
            "meshnet:inter_token_latency_seconds",
            "Between two tokens of a choice.",
            _MODEL,
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "meshnet:e2e_request_latency_seconds",
            "From a request's arrival to the end of a choice.",
            _MODEL,
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )

    def answered(self, method: str, route: str | None, status: int) -> None:
        """An answer has begun. `route` is the pattern of the URL, None if there is no such."""
        known = method if method in _METHODS else "other"
        self.http.labels(known, route or "other", str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class ChoiceMeter:
    """Measures one choice, from when it is handed to the mesh. `arrived` is when its request came, by the clock."""

    def __init__(self, metrics: Metrics, model_id: str, arrived: float) -> None:
        self._metrics = metrics
        self._model_id = model_id
        self._arrived = arrived
        self._last_token: float | None = None
        self._tokens = metrics.generation_tokens.labels(model_id)
        self._token_seconds = metrics.token_seconds.labels(model_id)
        metrics.waiting.labels(model_id).inc()

    def token(self) -> None:
        now = self._metrics.clock()
        self._tokens.inc()
        if self._last_token is None:
            self._metrics.first_token_seconds.labels(self._model_id).observe(now - self._arrived)
            self._metrics.waiting.labels(self._model_id).dec()
            self._metrics.running.labels(self._model_id).inc()
        else:
            self._token_seconds.observe(now - self._last_token)
        self._last_token = now

    def end(self, reason: str) -> None:
        """`reason` is the finish reason, or ABORT if the client went, or ERROR."""
        gauge = self._metrics.waiting if self._last_token is None else self._metrics.running
        gauge.labels(self._model_id).dec()
        self._metrics.finished.labels(self._model_id, reason).inc()
        self._metrics.request_seconds.labels(self._model_id).observe(self._metrics.clock() - self._arrived)
