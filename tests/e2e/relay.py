"""A TCP relay that a test opens and closes: a node behind it can be reached or not, and does not notice."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

Address = tuple[str, int]


class Relay:
    """Passes bytes from clients to a server and back. Closing it cuts all connections.

    `budget`: after so many bytes from the server nothing more comes through, and nobody is told; None: no limit.
    `delay`: seconds that all takes on its way, in each direction, however much is on its way.
    """

    def __init__(self, listen: Address, server: Address, budget: int | None = None, delay: float = 0.0) -> None:
        self._server = server
        self._budget = budget
        self._delay = delay
        self.answered_bytes = 0
        self.stalled = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] | None = []
        self._listener = socket.create_server(listen)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets or [], None
        for end in (self._listener, *sockets):
            # Wakes the thread that waits on it, which closing alone does not.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (self._listener, *sockets):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            with self._lock:
                if self._sockets is None:
                    client.close()
                    server.close()
                    return
                self._sockets += [client, server]
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, passes in ((client, server, _always), (server, client, self._passes)):
                self._start(_pump, source, _Late(sink, self._delay, self._start) if self._delay else sink, passes)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _passes(self, num_bytes: int) -> bool:
        with self._lock:
            self.answered_bytes += num_bytes
            if self._budget is None or self.answered_bytes <= self._budget:
                return True
            self.stalled.set()
            return False


@contextlib.contextmanager
def relay(listen: Address, server: Address, budget: int | None = None, delay: float = 0.0) -> Iterator[Relay]:
    opened = Relay(listen, server, budget, delay)
    try:
        yield opened
    finally:
        opened.close()


def _always(num_bytes: int) -> bool:
    return True


class _Late:
    """A socket to which all comes `delay` seconds late, in order. `start` starts the thread that brings it."""

    def __init__(self, sink: socket.socket, delay: float, start: Callable[..., None]) -> None:
        self._sink = sink
        self._delay = delay
        self._waiting: queue.SimpleQueue[tuple[float, Callable[[], object], bool]] = queue.SimpleQueue()
        start(self._bring)

    def sendall(self, data: bytes) -> None:
        self._later(lambda: self._sink.sendall(data))

    def shutdown(self, how: int) -> None:
        self._later(lambda: self._sink.shutdown(how), last=True)

    def _later(self, act: Callable[[], object], *, last: bool = False) -> None:
        self._waiting.put((time.monotonic() + self._delay, act, last))

    def _bring(self) -> None:
        last = False
        with contextlib.suppress(OSError):
            while not last:
                due, act, last = self._waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                act()


def _pump(source: socket.socket, sink: socket.socket | _Late, passes: Callable[[int], bool]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if passes(len(data)):
                sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
