"""Finds out which of the entry nodes that owe tokens are there at all.

A long prompt keeps an entry node silent for as long as a stopped process does. What tells them apart is whether it
answers a health check, which it does from its event loop whatever its steps take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshnet.tasks_by_key import TasksByKey

LATE_SECONDS = 1.0
MUTE_SECONDS = 3.0
WATCH_SECONDS = 0.5
_MUTE = frozenset({grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE})


@dataclass(eq=False, slots=True)
class Call:
    """A stream that was last heard of at `heard_at`, on the loop's clock. `is_mute`: it was cancelled for that."""

    address: str
    channel: grpc.aio.Channel
    stream: Any
    heard_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    is_mute: bool = False

    def heard(self) -> None:
        self.heard_at = asyncio.get_running_loop().time()


class EntryWatch:
    """The calls to entry nodes that are under way."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()

    @contextmanager
    def watched(self, address: str, channel: grpc.aio.Channel, stream: Any) -> Iterator[Call]:
        call = Call(address, channel, stream)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)

    async def run(self) -> None:
        """For ever."""
        checks = TasksByKey[str]()
        try:
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                late = asyncio.get_running_loop().time() - LATE_SECONDS
                for call in [call for call in self._calls if call.heard_at < late]:
                    checks.start(call.address, partial(self._check, call.address, call.channel))
        finally:
            checks.cancel()

    async def _check(self, address: str, channel: grpc.aio.Channel) -> None:
        """Raises nothing. Whatever is answered, it is there."""
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=MUTE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in _MUTE:
                for call in [call for call in self._calls if call.address == address]:
                    call.is_mute = True
                    call.stream.cancel()
