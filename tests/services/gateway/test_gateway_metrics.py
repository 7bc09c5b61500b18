from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshnet.errors import NextHopFailed
from services.gateway.metrics import ABORT, ChoiceMeter, Metrics
from tests.processes import wait_until
from tests.services.gateway.conftest import END
from tests.services.gateway.fake_mesh import FakeMesh, tokens, tokens_then_fail, tokens_then_wait
from tests.services.gateway.gateway_process import Gateway

SMOL = (("model_name", "smol"),)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name.removeprefix("meshnet:"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(gateway: Gateway) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = httpx.get(f"{gateway.url}/metrics")
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return samples(response.text)


def post(gateway: Gateway, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/completions", json={"model": "smol", "prompt": [5, 6], **body}, timeout=30)


@pytest.fixture
def before(gateway: Gateway) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return scraped(gateway)


def test_choices_tokens_and_times_are_counted(gateway: Gateway, mesh: FakeMesh, before: Any) -> None:
    mesh.a.script = tokens(81, 82, END, cached=1)
    assert post(gateway, n=2).status_code == 200
    after = scraped(gateway)

    def more(name: str, *labels: tuple[str, str]) -> Any:
        key = (name, tuple(sorted((*SMOL, *labels))))
        return after[key] - before.get(key, 0)

    assert more("request_success_total", ("finished_reason", "stop")) == 2
    assert more("prompt_tokens_total") == 2
    assert more("prefix_cache_hits_total") == 1
    assert more("generation_tokens_total") == 6
    assert more("time_to_first_token_seconds_count") == 2
    assert more("inter_token_latency_seconds_count") == 4
    assert more("e2e_request_latency_seconds_count") == 2
    assert (after["num_requests_running", SMOL], after["num_requests_waiting", SMOL]) == (0, 0)
    http = ("http_requests_total", (("method", "POST"), ("route", "/v1/completions"), ("status", "200")))
    assert after[http] - before.get(http, 0) == 1


def test_what_runs_waits_breaks_off_and_fails_is_told_apart(gateway: Gateway, mesh: FakeMesh, before: Any) -> None:
    mesh.a.script = tokens_then_wait(81)
    body = {"model": "smol", "prompt": "x", "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=30) as response:
        # Kept: without it the response is closed.
        events = response.iter_raw()
        next(events)
        assert scraped(gateway)["num_requests_running", SMOL] == 1
        mesh.a.script = tokens_then_wait()
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=30) as waiting:
            comments = waiting.iter_raw()
            next(comments)
            assert scraped(gateway)["num_requests_waiting", SMOL] == 1
    wait_until(lambda: scraped(gateway)["num_requests_running", SMOL] == 0)
    wait_until(lambda: scraped(gateway)["num_requests_waiting", SMOL] == 0)
    mesh.a.script = tokens_then_fail(NextHopFailed("hop b failed", "b"), 81)
    assert post(gateway).status_code == 502
    after = scraped(gateway)
    for reason, num in (("abort", 2), ("error", 1)):
        key = ("request_success_total", tuple(sorted((*SMOL, ("finished_reason", reason)))))
        assert after[key] - before.get(key, 0) == num


def test_what_clients_make_up_becomes_no_label(gateway: Gateway) -> None:
    post(gateway, model="made-up")
    httpx.get(f"{gateway.url}/made-up")
    httpx.get(f"{gateway.url}/v1/models/made-up")
    httpx.request("MADEUP", f"{gateway.url}/health")
    text = httpx.get(f"{gateway.url}/metrics").text.lower()
    assert "made-up" not in text
    assert "madeup" not in text
    routes = {dict(labels).get("route") for name, labels in samples(text) if name == "http_requests_total"}
    assert {"/v1/models/<path:model_id>", "other"} <= routes


@pytest.fixture
def clock() -> Iterator[float]:
    return itertools.chain([1.0, 3.0, 4.0], itertools.repeat(10.0))


def test_times_are_from_the_arrival_and_between_tokens(clock: Iterator[float]) -> None:
    metrics = Metrics(lambda: next(clock))
    meter = ChoiceMeter(metrics, "m", arrived=metrics.clock())
    meter.token()
    meter.token()
    meter.end(ABORT)
    told = samples(metrics.text().decode())
    labels = (("model_name", "m"),)
    assert told["time_to_first_token_seconds_sum", labels] == 2
    assert told["inter_token_latency_seconds_sum", labels] == 1
    assert told["e2e_request_latency_seconds_sum", labels] == 9
    assert told["request_success_total", (("finished_reason", "abort"), ("model_name", "m"))] == 1
