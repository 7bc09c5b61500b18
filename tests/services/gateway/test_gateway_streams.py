"""Clients that go away, read slowly, stay long or come in numbers: on real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from meshnet.v1 import inference_pb2
from tests.processes import wait_until
from tests.services.gateway.fake_mesh import (
    Call,
    FakeMesh,
    Script,
    model,
    shard,
    tokens,
    tokens_then_wait,
)
from tests.services.gateway.gateway_process import Gateway, running_gateway

WRITE_TIMEOUT = 2.0
REQUEST_TIMEOUT = 60.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[FakeMesh]:
    with FakeMesh() as mesh:
        mesh.tell(mesh.a.node(shard("smol")), smol=model("smol"))
        yield mesh


@pytest.fixture(scope="module")
def gateway(mesh: FakeMesh, smollm2_gguf: Path) -> Iterator[Gateway]:
    timeouts = ("--write-timeout", str(WRITE_TIMEOUT), "--request-timeout", str(REQUEST_TIMEOUT))
    with running_gateway("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}", *timeouts) as gateway:
        wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
        ask = {"model": "smol", "prompt": "x"}
        assert httpx.post(f"{gateway.url}/v1/completions", json=ask, timeout=60).status_code == 200
        yield gateway


@pytest.fixture(autouse=True)
def clean(mesh: FakeMesh, gateway: Gateway) -> None:
    mesh.a.requests.clear()


def request_bytes(*, stream: bool, max_tokens: int = 5) -> bytes:
    body = json.dumps({"model": "smol", "prompt": "x", "stream": stream, "max_tokens": max_tokens}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextlib.contextmanager
def connected(gateway: Gateway) -> Iterator[socket.socket]:
    with socket.create_connection(gateway.address, timeout=20) as connection:
        yield connection


def read_until(connection: socket.socket, text: bytes) -> bytes:
    received = b""
    while text not in received:
        data = connection.recv(65536)
        assert data, received
        received += data
    return received


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def assert_ended(mesh: FakeMesh) -> None:
    """The one call is over, long before its script or its deadline would have ended it."""
    assert mesh.a.has_ended(mesh.a.requests[0].request_id, timeout=REQUEST_TIMEOUT / 2)


@pytest.mark.parametrize("extra", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["", "crlf", "next"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_before_the_first_token_ends_the_work(
    gateway: Gateway, mesh: FakeMesh, stream: bool, extra: bytes
) -> None:
    mesh.a.script = tokens_then_wait()
    with connected(gateway) as connection:
        connection.sendall(request_bytes(stream=stream) + extra)
        wait_until(lambda: mesh.a.requests)
        assert not mesh.a.has_ended(mesh.a.requests[0].request_id)
    assert_ended(mesh)


def open_connections(gateway: Gateway) -> int:
    """With clients, at the gateway's end. The kernel names those that only the client has closed."""
    at = psutil.Process(gateway.process.process.pid).net_connections("tcp")
    return sum(one.laddr.port == gateway.address[1] and one.status != psutil.CONN_LISTEN for one in at)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere"])
def test_idle_connections_that_clients_close_are_given_up_at_once(gateway: Gateway, path: str) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(timeout=20)) for _ in range(20)]
        for client in clients:
            assert client.get(f"{gateway.url}{path}").headers["Content-Type"] == "application/json"
        wait_until(lambda: open_connections(gateway) >= len(clients))
    # Long before the 120 seconds for which idle ones are kept.
    wait_until(lambda: open_connections(gateway) == 0)


def test_connections_of_streams_that_clients_leave_are_given_up_at_once(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_wait(28)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(connected(gateway))
            connection.sendall(request_bytes(stream=True))
            read_until(connection, b"text_completion")
    wait_until(lambda: open_connections(gateway) == 0)


def test_a_client_that_goes_in_mid_stream_ends_the_work(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_wait(28, 29)
    with connected(gateway) as connection:
        connection.sendall(request_bytes(stream=True))
        read_until(connection, b"text_completion")
        assert not mesh.a.has_ended(mesh.a.requests[0].request_id)
    assert_ended(mesh)


def test_a_client_that_resets_its_connection_ends_the_work(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens_then_wait()
    with connected(gateway) as connection:
        connection.sendall(request_bytes(stream=False))
        wait_until(lambda: mesh.a.requests)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert_ended(mesh)


def endless() -> Script:
    def script(request: inference_pb2.GenerateRequest, call: Call) -> Iterator[inference_pb2.GenerateEvent]:
        while not call.ended.is_set():
            yield inference_pb2.GenerateEvent(token_id=28)

    return script


def test_a_client_that_does_not_read_is_cut_off_and_its_work_ends(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = endless()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(gateway.address)
        connection.sendall(request_bytes(stream=True, max_tokens=8000))
        wait_until(lambda: mesh.a.requests)
        assert_ended(mesh)
        assert b"[DONE]" not in read_to_end(connection)


def test_a_client_that_reads_little_at_a_time_is_not_cut_off(gateway: Gateway, mesh: FakeMesh) -> None:
    """Longer than the time after which one that reads nothing is."""
    mesh.a.script = endless()
    with connected(gateway) as connection:
        connection.sendall(request_bytes(stream=True, max_tokens=8000))
        deadline = time.monotonic() + 2.5 * WRITE_TIMEOUT
        while time.monotonic() < deadline:
            assert connection.recv(4096)
            time.sleep(0.05)
        assert not mesh.a.has_ended(mesh.a.requests[0].request_id)
    assert_ended(mesh)


def test_a_client_that_is_refused_may_finish_sending_and_reads_why(gateway: Gateway) -> None:
    size = 17 * 1024 * 1024
    with connected(gateway) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
        connection.sendall(b"x" * size)
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 413")
    assert received.endswith(b"}}")


def test_requests_sent_ahead_are_answered_in_order(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(28)
    with connected(gateway) as connection:
        connection.sendall(request_bytes(stream=False) + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        received = read_until(connection, b'"list"')
    assert received.index(b"text_completion") < received.index(b'"list"')


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET /x HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nX: " + b"x" * 99_999]
)
def test_what_is_not_http_is_refused_and_harms_nobody(gateway: Gateway, sent: bytes) -> None:
    with connected(gateway) as connection:
        connection.sendall(sent)
        assert read_to_end(connection).startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{gateway.url}/health").status_code == 200


def test_a_connection_is_kept_for_thousands_of_requests(gateway: Gateway) -> None:
    with connected(gateway) as connection:
        for _ in range(1100):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"connection: close" not in read_until(connection, b'"models"').lower()


def test_health_answers_while_a_long_text_is_tokenized(gateway: Gateway, mesh: FakeMesh) -> None:
    body = {"model": "smol", "prompt": "how are you? " * 50_000}
    answered = threading.Event()

    def ask() -> int:
        with httpx.Client(timeout=60) as client:
            status = client.post(f"{gateway.url}/v1/completions", json=body).status_code
            answered.set()
            return status

    with ThreadPoolExecutor(1) as executor, httpx.Client(timeout=20) as client:
        asked = executor.submit(ask)
        num_answers = 0
        while not answered.is_set():
            assert client.get(f"{gateway.url}/health").status_code == 200
            num_answers += 1
        assert asked.result() == 400
    assert num_answers > 1


def test_many_streams_at_once_all_come_whole(gateway: Gateway, mesh: FakeMesh) -> None:
    mesh.a.script = tokens(*[28] * 30)
    body = {"model": "smol", "prompt": "x", "stream": True, "max_tokens": 20}

    def ask(_: int) -> str:
        return httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60).text

    with ThreadPoolExecutor(16) as executor:
        answers = list(executor.map(ask, range(48)))
    assert all(answer.endswith("data: [DONE]\n\n") for answer in answers)
    assert {answer.count('"text":"') for answer in answers} == {21}


@pytest.fixture
def impatient(mesh: FakeMesh, smollm2_gguf: Path) -> Iterator[Gateway]:
    arguments = ("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}", "--request-timeout", "0.5")
    with running_gateway(*arguments) as gateway:
        wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
        yield gateway


def test_a_generation_past_its_deadline_is_a_504_or_an_event(impatient: Gateway, mesh: FakeMesh) -> None:
    ask: Callable[..., httpx.Response] = lambda **more: httpx.post(  # noqa: E731
        f"{impatient.url}/v1/completions", json={"model": "smol", "prompt": "x", **more}, timeout=60
    )
    mesh.a.script = tokens_then_wait()
    refused = ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "timeout")
    mesh.a.script = tokens_then_wait(28)
    # However busy the machine is: one begins before its deadline.
    answers = (ask(stream=True) for _ in range(20))
    broken = next(answer for answer in answers if answer.status_code == 200)
    assert json.loads(broken.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "timeout"
