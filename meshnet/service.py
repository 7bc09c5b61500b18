"""What every service's `__main__` does: logging, and running until a signal says stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Logs to standard error; standard output is for the line that says where the service listens."""
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    for noisy in ("asyncio", "httpx", "httpcore", "hypercorn.error", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


async def run_until_stopped(service: Coroutine[Any, Any, None]) -> None:
    """Runs a service until it ends or SIGINT or SIGTERM arrives. Raises what the service raised."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stopped.set)
    running = asyncio.create_task(service)
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
