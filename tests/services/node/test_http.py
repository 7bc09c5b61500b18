"""A node's HTTP face over real sockets, on a stub executor: every golden frame, and what is wrong gets its 4xx."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from meshnet import wire
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Topology
from services.node.config import NodeConfig
from services.node.core.compression import Compression
from services.node.core.sessions import SessionTable
from services.node.core.shards import ShardTable
from services.node.core.work import ShardSpec
from services.node.forwarding import Forwarding
from services.node.http_server import MAX_ECHO_BYTES, HttpServer
from services.node.peers import Peers
from services.node.runner import Runner
from services.node.stub import StubExecutor
from tests.models import manifest

GOLDEN = Path(__file__).parents[2] / "golden"
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
SESSION = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
KV_TOKENS = 4096


class StubNode:
    """The HTTP side of one node, holding layers 4-8 of a model whose width the frames have."""

    def __init__(self, url: str, forwarding: Forwarding, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.forwarding = forwarding
        self._http = http

    async def post(self, headers: dict[str, str], body: bytes) -> tuple[int, Any, bytes]:
        async with self._http.post(f"{self.url}/forward", headers=headers, data=body) as answer:
            return answer.status, answer.headers, await answer.read()

    async def delete(self, session: str, keep: str | None = None) -> int:
        more = {} if keep is None else {wire.KEEP: keep}
        async with self._http.delete(f"{self.url}/sessions/{session}", headers=more) as answer:
            return answer.status

    def open(self, path: str, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._http.post(f"{self.url}{path}", data=io.BytesIO(body))

    async def health(self) -> int:
        async with self._http.get(f"{self.url}/health") as answer:
            return answer.status


async def serve(width: int) -> AsyncIterator[StubNode]:
    config = NodeConfig("n", "", "127.0.0.1:0", "", "127.0.0.1", 0, Quantization.BFLOAT16, body_timeout=0.3)
    shards, sessions, runner = ShardTable(), SessionTable(), Runner(StubExecutor())
    peers = Peers(Topology, Compression.OFF, 5.0)
    forwarding = Forwarding(shards, sessions, runner, peers, reorder_timeout=0.2)
    spec = ShardSpec(manifest("golden", 12, width), LayerRange(4, 8), Quantization.BFLOAT16, KV_TOKENS)
    executor = runner.executor
    executor.attach(executor.load(spec, lambda done, total: None))
    shards.add(spec)
    sessions.ledger("golden").add_layers(spec.layers, spec.kv_tokens)
    server = HttpServer(config, forwarding, lambda: {"status": "ok"})
    address = await server.start("127.0.0.1:0")
    async with aiohttp.ClientSession() as http:
        yield StubNode(f"http://{address}", forwarding, http)
    await server.stop()
    await peers.close()
    runner.stop()
    sessions.check_integrity()


@pytest.fixture
async def node() -> AsyncIterator[StubNode]:
    async for stub in serve(4):
        yield stub


def headers(**more: str) -> dict[str, str]:
    return {
        wire.SHAPE: "1,3,4",
        wire.DTYPE: "bfloat16",
        wire.SESSION: SESSION,
        "Content-Type": wire.CONTENT_TYPE,
        **more,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
async def test_golden_frames(case: dict[str, Any]) -> None:
    shape = next((v for k, v in case["headers"].items() if k.lower() == "x-meshnet-shape"), "1,3,4")
    width = int(shape.rsplit(",", 1)[1]) if "error" not in case else 4
    async for node in serve(width):
        # Frames that go on in the middle of a session need what comes before.
        before = [int(v) for k, v in case["headers"].items() if k.lower() == "x-meshnet-position" for v in v.split(",")]
        if "error" not in case and any(before):
            for session, length in zip(case["headers"]["X-Meshnet-Session"].split(","), before, strict=True):
                first = headers(**{wire.SHAPE: f"1,{length},{width}", wire.SESSION: session})
                assert (await node.post(first, bytes(length * width * 2)))[0] == 200
        status, answer, body = await node.post(case["headers"], (GOLDEN / case["body"]).read_bytes())
        if "error" in case:
            assert status == 400, body
            assert json.loads(body)["error"]["code"] == case["error"]
            assert json.loads(body)["error"]["node"] == "n"
            assert answer[wire.VERSION] == "1"
        else:
            assert status == 200, body
            frame = wire.parse_response_headers(answer)
            rows, positions, _ = (int(part) for part in shape.split(","))
            asked = {k.lower(): v for k, v in case["headers"].items()}.get("x-meshnet-return", positions)
            assert (frame.rows, frame.positions, frame.hidden) == (rows, int(asked), width)
            assert len(wire.decode_body(frame, body)) == rows * int(asked) * width * 2
        assert await node.health() == 200


async def test_the_node_answers_with_what_it_has_cached(node: StubNode) -> None:
    assert (await node.post(headers(), bytes(24)))[0] == 200
    status, answer, body = await node.post(headers(**{wire.POSITION: "7"}), bytes(24))
    assert (status, answer[wire.CACHED_LENGTH]) == (409, "3")
    assert json.loads(body)["error"]["code"] == "position"


async def test_a_chunk_that_overtakes_the_one_before_it_waits_for_it(node: StubNode) -> None:
    chunk = {wire.CHUNK_TOTAL: "2"}
    late = asyncio.create_task(node.post(headers(**chunk, **{wire.CHUNK_INDEX: "1", wire.POSITION: "3"}), bytes(24)))
    first = asyncio.create_task(node.post(headers(**chunk, **{wire.CHUNK_INDEX: "0", wire.POSITION: "0"}), bytes(24)))
    assert (await late)[0] == 200
    assert (await first)[0] == 200


async def test_a_chunk_whose_predecessor_never_comes_is_refused_in_time(node: StubNode) -> None:
    lost = headers(**{wire.CHUNK_INDEX: "1", wire.CHUNK_TOTAL: "2", wire.POSITION: "3"})
    status, answer, _ = await node.post(lost, bytes(24))
    assert (status, answer[wire.CACHED_LENGTH]) == (409, "0")


async def test_other_layers_models_and_widths_are_named(node: StubNode) -> None:
    for more, code, status in (
        ({wire.LAYERS: "3,9"}, "wrong_layers", 421),
        ({wire.MODEL: "other"}, "unknown_model", 404),
        ({wire.SHAPE: "1,3,5"}, "bad_frame", 400),
    ):
        answered, _, body = await node.post(headers(**more), bytes(30 if wire.SHAPE in more else 24))
        assert (answered, json.loads(body)["error"]["code"]) == (status, code)


async def test_a_hop_that_is_not_in_the_mesh_is_never_dialled(node: StubNode) -> None:
    status, answer, body = await node.post(headers(**{wire.ROUTE: "evil.example:8-12"}), bytes(24))
    assert (status, answer[wire.FAILED_NODE]) == (502, "evil.example")
    assert "not in the mesh" in json.loads(body)["error"]["message"]


async def test_freeing_gives_the_room_back_and_an_unknown_session_is_no_error(node: StubNode) -> None:
    assert (await node.post(headers(), bytes(24)))[0] == 200
    assert node.forwarding.sessions.free_tokens() < KV_TOKENS
    assert await node.delete(SESSION) == 204
    assert await node.delete(SESSION) == 204
    assert await node.delete("no-uuid") == 400
    assert node.forwarding.sessions.free_tokens() == KV_TOKENS


async def test_an_ended_session_may_leave_what_another_begins_with(node: StubNode) -> None:
    other = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
    sessions = node.forwarding.sessions
    assert (await node.post(headers(**{wire.SHAPE: "1,300,4"}), bytes(2400)))[0] == 200
    assert await node.delete(SESSION, "many") == 400
    assert await node.delete(SESSION, "299") == 204
    assert (sessions.free_tokens(), sessions.ledger("golden").kept_tokens) == (KV_TOKENS, 256)
    begun = {wire.SESSION: other, wire.POSITION: "256", wire.PREFIX: f"{SESSION},256,take"}
    assert (await node.post(headers(**begun), bytes(24)))[0] == 200
    assert (await node.post(headers(**{wire.SESSION: other}), bytes(24)))[0] == 200
    assert sessions.length(sessions.keys_of(other)[0]) == 262
    # It was taken, so nobody else has it.
    late = begun | {wire.SESSION: other.replace("7", "8")}
    status, answer, body = await node.post(headers(**late), bytes(24))
    assert (status, answer[wire.CACHED_LENGTH], json.loads(body)["error"]["code"]) == (409, "0", "position")
    assert await node.delete(other) == 204
    assert sessions.free_tokens() == KV_TOKENS


async def test_a_full_kv_cache_asks_to_come_back(node: StubNode) -> None:
    big = headers(**{wire.SHAPE: f"1,{KV_TOKENS + 1},4"})
    status, answer, body = await node.post(big, bytes((KV_TOKENS + 1) * 8))
    assert (status, json.loads(body)["error"]["code"]) == (429, "kv_full")
    assert int(answer["Retry-After"]) >= 1


async def test_a_frame_over_the_limit_is_refused_before_its_body_is_read(node: StubNode) -> None:
    status, _, body = await node.post(headers(**{wire.SHAPE: "1,100000,4000"}), b"")
    assert (status, json.loads(body)["error"]["code"]) == (413, "frame_too_large")


async def test_a_body_that_stalls_is_given_up(node: StubNode) -> None:
    async def stall() -> AsyncIterator[bytes]:
        yield bytes(8)
        await asyncio.Event().wait()

    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{node.url}/forward", headers=headers(), data=stall()) as answer,
    ):
        assert answer.status == 400
        assert "did not arrive" in (await answer.json())["error"]["message"]
    assert await node.health() == 200


async def test_an_echo_takes_a_body_in_and_answers_with_what_is_asked_for(node: StubNode) -> None:
    for sent, asked in ((0, 0), (MAX_ECHO_BYTES, 0), (5, MAX_ECHO_BYTES)):
        async with node.open(f"/echo?answer_bytes={asked}", bytes(sent)) as answer:
            assert (answer.status, await answer.read()) == (200, bytes(asked))
    assert len(node.forwarding.sessions) == 0


async def test_an_echo_is_bounded(node: StubNode) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 16)

    async with node.open("/echo", bytes(MAX_ECHO_BYTES + 1)) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (413, "frame_too_large")
    async with aiohttp.ClientSession() as http:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with http.post(f"{node.url}/echo", data=endless()) as answer:
                assert answer.status == 413
    for asked in (str(MAX_ECHO_BYTES + 1), "-1", "1e3", "9" * 5000, "0" * 5000, "٣", ""):
        async with node.open(f"/echo?answer_bytes={asked}", b"") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_request")
    assert await node.health() == 200


async def test_a_draining_node_says_so(node: StubNode) -> None:
    node.forwarding.draining = True
    status, _, body = await node.post(headers(), bytes(24))
    assert (status, json.loads(body)["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/forward", 405), ("GET", "/nothing", 404)])
async def test_other_requests_get_json_errors_too(node: StubNode, method: str, path: str, status: int) -> None:
    async with aiohttp.ClientSession() as http, http.request(method, node.url + path) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["code"]


async def test_a_thousand_rows_fit_the_header_limits(node: StubNode) -> None:
    rows = wire.MAX_ROWS
    sessions = ",".join(f"00000000-0000-4000-8000-{index:012x}" for index in range(rows))
    status, _, body = await node.post(headers(**{wire.SHAPE: f"{rows},1,4", wire.SESSION: sessions}), bytes(rows * 8))
    assert status in {200, 429}, body
