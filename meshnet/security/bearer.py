"""The secret in requests of httpx."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from meshnet.security.shared_secret import HEADER, SharedSecret


class BearerAuth(httpx.Auth):
    """Each request shows the token that is the one to show then. Only for members of the mesh."""

    def __init__(self, secret: SharedSecret) -> None:
        self._secret = secret

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers[HEADER] = self._secret.authorization
        yield request


def bearer(secret: SharedSecret | None) -> BearerAuth | None:
    return BearerAuth(secret) if secret else None
