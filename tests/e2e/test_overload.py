"""More prompts than a mesh keeps waiting: those are told when to come again, and the others have their turn."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import NodeSpec, running_mesh
from tests.e2e.tiny import save_tiny_llama
from tests.processes import wait_until

MODEL = "tiny"
# One sequence has room for so many, and is minutes at it.
KV_TOKENS = 65536
# What a node keeps waiting, which is its default: so many requests of so many choices.
MAX_WAITING = 256
NUM_CHOICES = 128
NUM_REQUESTS = MAX_WAITING // NUM_CHOICES


@pytest.mark.slow
def test_what_the_queue_has_no_place_for_is_a_429(tmp_path: Path) -> None:
    weights = save_tiny_llama(tmp_path / "tiny", context_length=KV_TOKENS, vocabulary=True)
    nodes = [NodeSpec("a", "220MB", tracker_node=True)]
    with running_mesh([f"{MODEL}={weights}"], nodes, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True) as mesh:
        url = f"{mesh.gateway_url}/v1/completions"

        def waiting() -> int:
            text = httpx.get(f"{mesh.gateway_url}/metrics", timeout=10).text
            (count,) = re.findall(r"^meshnet:num_requests_waiting\{.*\} (\S+)$", text, re.MULTILINE)
            return int(float(count))

        def ask(**more: Any) -> httpx.Response:
            return httpx.post(url, json={"model": MODEL, "prompt": [7], "max_tokens": 2, **more}, timeout=120)

        whole = {"model": MODEL, "prompt": [5], "max_tokens": KV_TOKENS - 1, "ignore_eos": True, "stream": True}
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            with httpx.stream("POST", url, json=whole, timeout=60) as holder:
                # Kept: a stream is closed with its iterator.
                lines = holder.iter_lines()
                assert "choices" in next(lines)
                others = [pool.submit(ask, n=NUM_CHOICES) for _ in range(NUM_REQUESTS)]
                wait_until(lambda: waiting() == NUM_REQUESTS * NUM_CHOICES, 30, "all of them wait", mesh.logs)
                for stream in (False, True):
                    refused = ask(stream=stream)
                    assert refused.status_code == 429
                    assert int(refused.headers["Retry-After"]) >= 1
                    error = refused.json()["error"]
                    assert (error["type"], error["code"]) == ("rate_limit_error", "kv_full")
                    assert f"{MAX_WAITING} prompts wait" in error["message"]
                assert not any(other.done() for other in others)
            for other in others:
                assert len(other.result(120).json()["choices"]) == NUM_CHOICES
        assert ask().status_code == 200
        mesh.wait_until_idle()
