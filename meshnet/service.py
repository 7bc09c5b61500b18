"""What every service's `__main__` does: logging, and running until a signal says stop."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from meshnet.errors import InvalidRequest, MeshnetError

# Set by a parent, to its process id, that wants its services to end with it, however it ends.
EXIT_WITH_PARENT = "MESHNET_EXIT_WITH_PARENT"
PR_SET_PDEATHSIG = 1
# From the signal on. What takes longer is stuck, and would keep its ports.
STOP_SECONDS = 30.0
log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Logs to standard error; standard output is for the line that says where the service listens.

    Raises InvalidRequest for what is no level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InvalidRequest(f"{level!r} is not a log level: use debug, info, warning or error")
    logging.basicConfig(level=number, format=LOG_FORMAT, stream=sys.stderr)
    for noisy in ("asyncio", "httpx", "httpcore", "hypercorn.error", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


async def run_until_stopped(service: Coroutine[Any, Any, None]) -> None:
    """Runs a service until it ends or SIGINT or SIGTERM arrives. Raises what the service raised."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stopped.set)
    exit_with_parent()
    running = asyncio.create_task(service)
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()
    running.cancel()
    await asyncio.wait((running,), timeout=STOP_SECONDS)
    if not running.done():
        stack = "".join(traceback.format_stack(running.get_stack()[-1])) if running.get_stack() else "no stack"
        log.critical("not stopped within %g s: ending at once; it waits in\n%s", STOP_SECONDS, stack)
        os._exit(1)
    if not running.cancelled():
        running.result()


def run_process(command: Callable[[], object]) -> NoReturn:
    """Runs a service's command line and ends the process, with the code that it exits with.

    The interpreter's clean-up is left out. Threads of libraries outlive the event loop, and it was seen to collect
    garbage for ever beside them, with the service long stopped.
    """
    try:
        command()
        code: int | str | None = 0
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def expected_error(error: BaseException) -> BaseException:
    """The first error inside a group that is meant for the person who started the service.

    Raises the error itself if it is none of those: a defect must show its traceback.
    """
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    if isinstance(inner, (MeshnetError, OSError, RuntimeError)):
        return inner
    raise error


def exit_with_parent() -> None:
    """If the parent asked for it, has the kernel send SIGTERM when it dies. Linux only; elsewhere its clean-up must do.

    Call it when SIGTERM is handled.
    """
    parent = os.environ.get(EXIT_WITH_PARENT)
    if parent and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # It may have died before the line above.
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGTERM)
