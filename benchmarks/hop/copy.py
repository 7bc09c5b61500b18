"""A plain copy of bytes over TCP between two processes: `python -m benchmarks.hop.copy SIZE` takes them in.

Writes its port; whoever connects sends SIZE bytes and is answered with one, again and again.
"""

from __future__ import annotations

import socket
import sys
import time


def serve(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        view = memoryview(bytearray(size))
        with connection:
            while True:
                received = 0
                while received < size:
                    count = connection.recv_into(view[received:])
                    if not count:
                        return
                    received += count
                connection.sendall(b"\0")


def copy_times(port: int, data: bytes, repeats: int) -> list[float]:
    """Seconds that each of so many copies took, until they were confirmed."""
    times = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(repeats):
            started = time.perf_counter()
            connection.sendall(data)
            assert connection.recv(1) == b"\0"
            times.append(time.perf_counter() - started)
    return times


if __name__ == "__main__":
    serve(int(sys.argv[1]))
