"""A TCP relay that a test opens and closes: a node behind it can be reached or not, and does not notice."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

Address = tuple[str, int]


class Relay:
    """Passes bytes from clients to a server and back. Closing it cuts all connections."""

    def __init__(self, listen: Address, server: Address) -> None:
        self._server = server
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
            for source, sink in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=_pump, args=(source, sink), daemon=True))
                self._threads[-1].start()


@contextlib.contextmanager
def relay(listen: Address, server: Address) -> Iterator[None]:
    opened = Relay(listen, server)
    try:
        yield
    finally:
        opened.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
