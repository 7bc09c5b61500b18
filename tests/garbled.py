"""A gRPC server some of whose answers were changed on their way: they are no messages, or make no sense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from meshnet import rpc

NO_MESSAGE = b"\xff\xff\xff\xff"


class GarbledService:
    """`answers`: of each method what its calls are answered with, one call after the other; the last one again and
    again. A stream stays open behind it. `peers`: who has called."""

    def __init__(
        self, service: str, answers: Mapping[str, Sequence[bytes]], streams: Mapping[str, Sequence[bytes]]
    ) -> None:
        self.peers: list[str] = []
        unary = {name: grpc.unary_unary_rpc_method_handler(self._unary(list(all_))) for name, all_ in answers.items()}
        stream = {
            name: grpc.unary_stream_rpc_method_handler(self._stream(list(all_))) for name, all_ in streams.items()
        }
        self.handler = grpc.method_handlers_generic_handler(service, unary | stream)

    def _unary(self, answers: list[bytes]) -> Any:
        async def answer(_: bytes, context: Any) -> bytes:
            self.peers.append(context.peer())
            return answers.pop(0) if len(answers) > 1 else answers[0]

        return answer

    def _stream(self, answers: list[bytes]) -> Any:
        async def answer(_: bytes, context: Any) -> AsyncIterator[bytes]:
            self.peers.append(context.peer())
            yield answers.pop(0) if len(answers) > 1 else answers[0]
            await asyncio.Event().wait()

        return answer


@asynccontextmanager
async def served(service: GarbledService) -> AsyncIterator[str]:
    """Its address."""
    server = rpc.server()
    server.add_generic_rpc_handlers((service.handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
