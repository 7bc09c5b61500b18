"""The HTTP face of a node: POST /forward and /returns/{ticket}, DELETE /sessions/{uuid}, POST /echo, GET /health, and
weights for other nodes (see file_server). It only translates. Frames are taken in by `services.node.http`, which leaves
all else to what is here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from meshnet import wire
from meshnet.addresses import join_address, split_address
from meshnet.errors import BadFrame, FrameTooLarge, InvalidRequest, MeshnetError, Unauthenticated
from meshnet.security.shared_secret import HEADER
from services.node.config import NodeConfig
from services.node.fetching.mesh_weights import MeshWeights
from services.node.file_server import FileServer
from services.node.forwarding import Forwarding
from services.node.frames import Frames
from services.node.http.messages import FORWARD, RETURNS, SESSIONS, Answer
from services.node.http.server import IDLE_SECONDS, FrameServer

log = logging.getLogger(__name__)

# What a measurement of the link to this node may send, and be answered with.
MAX_ECHO_BYTES = 1 << 20
ECHO_TIMEOUT = 10.0
# Of one connection. With aiohttp's own 64 KiB, the frames of a large model are stopped and started dozens of times.
READ_BUFFER_BYTES = 1 << 20
# What GET /health says to those who do not show the secret of the mesh.
LIVENESS = ("status", "registered")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves a node's HTTP until stopped. `health` returns the body of GET /health."""

    def __init__(
        self,
        config: NodeConfig,
        forwarding: Forwarding,
        health: Callable[[], dict[str, Any]],
        weights: MeshWeights | None = None,
    ) -> None:
        self._node_id = config.node_id
        self._frames = Frames(config.node_id, forwarding, config.max_frame_bytes)
        self._body_timeout = config.body_timeout
        self._health = health
        self._secret = config.secret
        app = web.Application(middlewares=[self._errors, self._guard])
        app.router.add_post(FORWARD, self._take_frame)
        app.router.add_post(RETURNS + "{ticket}", self._take_frame)
        app.router.add_delete(SESSIONS + "{session}", self._free)
        app.router.add_post("/echo", self._echo)
        app.router.add_get("/health", self._get_health)
        FileServer(config.models, weights).add_routes(app.router)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=IDLE_SECONDS,
            read_bufsize=READ_BUFFER_BYTES,
            shutdown_timeout=1,
            max_line_size=wire.MAX_FIELD_CHARS,
            max_field_size=wire.MAX_FIELD_CHARS,
            auto_decompress=False,
        )
        self._server: FrameServer | None = None

    async def start(self, listen: str) -> str:
        """Begins to serve; returns the `host:port` that it really listens at. Raises OSError if it cannot."""
        host, port = split_address(listen)
        await self._runner.setup()
        assert self._runner.server, "it is set up"
        self._server = FrameServer(self._frames, self._runner.server, self._body_timeout, self._secret)
        return join_address(host, await self._server.start(host, port))

    async def stop(self) -> None:
        if self._server:
            await self._server.stop()
        await self._runner.cleanup()

    async def _take_frame(self, request: web.Request) -> web.Response:
        """A frame as `FrameServer` does not read it: in pieces, say, or after a request for something else."""
        admitted = self._frames.admit(request.path, wire.Fields.of(request.headers.items()))
        body = await self._read_body(request, admitted.max_bytes)
        return _response(await self._frames.answer(admitted, body))

    async def _free(self, request: web.Request) -> web.Response:
        asked = wire.Fields.of(request.headers.items())
        return _response(await self._frames.answer(self._frames.admit(request.path, asked), b""))

    async def _echo(self, request: web.Request) -> web.Response:
        """Takes a body in and answers with as many bytes as `answer_bytes` in the query asks for. Nothing else."""
        asked = request.query.get("answer_bytes", "0")
        answer_bytes = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 9 else MAX_ECHO_BYTES + 1
        if answer_bytes > MAX_ECHO_BYTES:
            raise InvalidRequest(f"answer_bytes must be from 0 to {MAX_ECHO_BYTES}")
        size = 0
        try:
            async with asyncio.timeout(ECHO_TIMEOUT):
                async for chunk in request.content.iter_any():
                    size += len(chunk)
                    if size > MAX_ECHO_BYTES:
                        raise FrameTooLarge(f"an echo takes {MAX_ECHO_BYTES} bytes at most")
        except TimeoutError:
            raise InvalidRequest(f"the body did not arrive within {ECHO_TIMEOUT:g} s") from None
        return web.Response(body=bytes(answer_bytes), content_type="application/octet-stream")

    async def _get_health(self, request: web.Request) -> web.Response:
        health = self._health()
        try:
            self._check(request)
        except Unauthenticated:
            # Whether it lives is nobody's secret; what it does is.
            health = {name: health[name] for name in LIVENESS if name in health}
        return web.json_response(health)

    async def _read_body(self, request: web.Request, limit: int) -> bytes:
        if (request.content_length or 0) > limit:
            raise BadFrame(f"the body has {request.content_length} bytes, a frame of this shape at most {limit}")
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout):
                async for chunk in request.content.iter_any():
                    size += len(chunk)
                    if size > limit:
                        raise BadFrame(f"the body goes on after the {limit} bytes that its shape allows")
                    chunks.append(chunk)
        except TimeoutError:
            raise BadFrame(f"the body did not arrive within {self._body_timeout:g} s") from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Before a body is read."""
        if request.match_info.handler != self._get_health:
            self._check(request)
        return await handler(request)

    def _check(self, request: web.Request) -> None:
        """Raises Unauthenticated if there is a secret and the request does not show it."""
        if self._secret:
            self._secret.check(request.headers.get(HEADER))

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every failure answers as JSON with an exact code, and the node lives on."""
        try:
            return await handler(request)
        except MeshnetError as error:
            return self._answer(error, error.status)
        except web.HTTPException as error:
            return self._answer(InvalidRequest(f"{request.method} {request.path}: {error.reason}"), error.status)
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return self._answer(MeshnetError("this node failed on the request; its log says why"), 500)

    def _answer(self, error: MeshnetError, status: int) -> web.Response:
        return _response(replace(self._frames.refusal(error), status=status))


def _response(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, headers=answer.fields, body=answer.body)
