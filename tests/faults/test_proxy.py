"""Each behaviour of the proxy, seen by a client of a server of real sockets."""

from __future__ import annotations

import contextlib
import http.client
import queue
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.faults.behaviour import PASS, REFUSE, RESET, STALL, Behaviour, Way
from tests.faults.proxy import Proxy, proxy
from tests.processes import wait_until

ANYWHERE = ("127.0.0.1", 0)
BODY = bytes(range(256)) * 40
# Long enough to tell that nothing comes, where something would come at once.
SILENCE_SECONDS = 0.3


class EchoServer(ThreadingHTTPServer):
    """Answers a POST with its body, and keeps all bodies."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(ANYWHERE, _Echo)
        self.bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.socket.getsockname()
        return host, port


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body of an answer leave together.
    wbufsize = -1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert isinstance(self.server, EchoServer)
        self.server.bodies.put(body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with EchoServer() as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,))
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


@pytest.fixture
def between(server: EchoServer) -> Iterator[Proxy]:
    with proxy(ANYWHERE, server.address) as opened:
        yield opened


@contextlib.contextmanager
def client(between: Proxy, timeout: float = 10.0) -> Iterator[http.client.HTTPConnection]:
    with contextlib.closing(http.client.HTTPConnection(between.address, timeout=timeout)) as connection:
        yield connection


def echoed(connection: http.client.HTTPConnection, body: bytes = BODY) -> bytes:
    connection.request("POST", "/", body)
    return connection.getresponse().read()


def test_all_passes_as_it_is_over_connections_that_stay(between: Proxy) -> None:
    with client(between) as one, client(between) as other:
        for _ in range(3):
            assert echoed(one) == echoed(other) == BODY
        assert between.num_connections == 2
    wait_until(lambda: not between.num_connections, 10, "closed connections are forgotten")


def test_refused_are_new_connections_and_not_those_that_stand(between: Proxy) -> None:
    with client(between) as old, client(between) as new:
        assert echoed(old) == BODY
        between.behave(REFUSE)
        with pytest.raises(ConnectionRefusedError):
            echoed(new)
        new.close()
        assert echoed(old) == BODY
        between.behave(PASS)
        assert echoed(new) == BODY


def test_reset_are_those_that_stand_and_new_ones(between: Proxy) -> None:
    with client(between) as old, client(between) as new:
        assert echoed(old) == BODY
        between.behave(RESET)
        for connection in (old, new):
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                echoed(connection)
            connection.close()
        assert between.num_reset == 2
        between.behave(PASS)
        assert echoed(old) == BODY


def test_one_reset_leaves_new_connections_alone(between: Proxy) -> None:
    with client(between) as old, client(between) as new:
        assert echoed(old) == BODY
        between.reset()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            echoed(old)
        assert echoed(new) == BODY


def test_stalled_are_those_that_stand_and_new_ones_and_all_goes_on_later(between: Proxy, server: EchoServer) -> None:
    with client(between) as old, client(between) as new:
        assert echoed(old) == BODY
        server.bodies.get(timeout=10)
        between.behave(STALL)
        for connection in (old, new):
            connection.request("POST", "/", BODY)
        with pytest.raises(queue.Empty):
            server.bodies.get(timeout=SILENCE_SECONDS)
        between.behave(PASS)
        assert old.getresponse().read() == new.getresponse().read() == BODY


def test_a_stall_one_way_lets_the_other_pass(between: Proxy, server: EchoServer) -> None:
    with client(between, timeout=SILENCE_SECONDS) as connection:
        assert echoed(connection) == server.bodies.get(timeout=10)
        between.behave(Behaviour(stalls=Way.TO_CLIENT))
        connection.request("POST", "/", BODY)
        assert server.bodies.get(timeout=10) == BODY
        with pytest.raises(TimeoutError):
            connection.getresponse()


def test_what_is_delayed_comes_late_each_way(between: Proxy) -> None:
    between.behave(Behaviour(delay=0.1))
    with client(between) as connection:
        began = time.monotonic()
        assert echoed(connection) == BODY
        assert time.monotonic() - began >= 0.2


def test_an_answer_is_cut_in_its_body(between: Proxy) -> None:
    between.behave(Behaviour(cuts_after=1000))
    with client(between) as connection, pytest.raises(http.client.IncompleteRead) as cut:
        echoed(connection)
    assert 0 < len(cut.value.partial) < 1000
    assert BODY.startswith(cut.value.partial)


def test_answers_stall_after_so_many_bytes(between: Proxy) -> None:
    between.behave(Behaviour(stalls_after=2 * len(BODY)))
    with client(between, timeout=SILENCE_SECONDS) as connection:
        assert echoed(connection) == BODY
        assert not between.stalled.is_set()
        with pytest.raises(TimeoutError):
            echoed(connection)
        assert between.stalled.is_set()
        assert between.answered_bytes > 2 * len(BODY)


def test_one_bit_of_every_second_body_is_flipped_and_heads_are_left_alone(between: Proxy) -> None:
    between.behave(Behaviour(corrupts=2))
    with client(between) as connection:
        for number in range(1, 5):
            # Of four bodies two are requests.
            got = echoed(connection)
            flipped = sum((a ^ b).bit_count() for a, b in zip(got, BODY, strict=True))
            assert (flipped, between.num_corrupted) == (1, number)


def test_bits_are_flipped_anywhere(between: Proxy) -> None:
    between.behave(Behaviour(corrupts_anywhere=1))
    with client(between) as connection:
        connection.request("POST", "/", BODY)
        wait_until(lambda: between.num_corrupted, 10, "something is corrupt")


def test_every_second_request_comes_twice(between: Proxy, server: EchoServer) -> None:
    between.behave(Behaviour(duplicates=2))
    asked = [b"one", b"two", b"three", b"four"]
    with client(between) as connection:
        assert [echoed(connection, body) for body in asked] == asked
    got = sorted(server.bodies.get(timeout=10) for _ in range(6))
    assert got == sorted([*asked, b"two", b"four"])


def test_a_later_request_overtakes_an_earlier_one(between: Proxy, server: EchoServer) -> None:
    with client(between) as one, client(between) as other:
        for connection in (one, other):
            assert echoed(connection, b"before") == server.bodies.get(timeout=10)
        between.behave(Behaviour(reorders=10.0))
        one.request("POST", "/", b"early")
        wait_until(lambda: between.is_holding, 10, "one is held back")
        assert echoed(other, b"late") == b"late"
        assert one.getresponse().read() == b"early"
    # Not in this order: threads of the server take them, each when it gets to run.
    assert sorted(server.bodies.get(timeout=10) for _ in range(2)) == [b"early", b"late"]
    assert between.num_reordered == 1


def test_a_request_that_none_overtakes_goes_on(between: Proxy) -> None:
    between.behave(Behaviour(reorders=SILENCE_SECONDS))
    with client(between) as connection:
        assert echoed(connection) == BODY
    assert between.num_reordered == 0


def test_a_server_that_is_gone_ends_the_connection(server: EchoServer) -> None:
    with socket.create_server(ANYWHERE) as nobody:
        gone = nobody.getsockname()
    with proxy(ANYWHERE, gone) as between, client(between) as connection, pytest.raises(ConnectionError):
        echoed(connection)
