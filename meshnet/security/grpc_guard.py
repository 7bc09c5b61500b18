"""Asks for the secret in every call of a gRPC server but health checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health

from meshnet.errors import MeshnetError, Unauthenticated
from meshnet.security.shared_secret import KEY, SharedSecret

_LIVENESS: Final = f"/{health.SERVICE_NAME}/"

Refuse = Callable[[Any, MeshnetError], Awaitable[None]]


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`refuse` ends a call with an error."""

    def __init__(self, secret: SharedSecret, refuse: Refuse) -> None:
        self._secret = secret
        self._refuse = refuse

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        if not call.method.startswith(_LIVENESS):
            try:
                self._secret.check(next((value for key, value in call.invocation_metadata if key == KEY), None))
            except Unauthenticated as error:
                return self._refusal(error)
        return await continuation(call)

    def _refusal(self, error: Unauthenticated) -> Any:
        async def refuse(_: Any, context: Any) -> None:
            await self._refuse(context, error)

        # Of a stream, whatever was called: nothing of the request is read then.
        return grpc.stream_stream_rpc_method_handler(refuse)
