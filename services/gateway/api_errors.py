"""Errors as clients of the OpenAI API see them, and how the mesh's own errors become such."""

from __future__ import annotations

import math
from typing import Any

from meshnet.errors import (
    BrokenNode,
    Busy,
    Draining,
    InvalidGrammar,
    InvalidRequest,
    KvFull,
    MeshnetError,
    MissingLayers,
    NextHopFailed,
    NextHopTimeout,
    RouteNotReady,
    UnknownModel,
    Unregistered,
)

# Statuses of the codes that an entry node may send. Any other code of the mesh is a fault inside it.
_STATUS = {
    kind.code: kind.status
    for kind in (
        InvalidRequest,
        InvalidGrammar,
        UnknownModel,
        KvFull,
        Draining,
        Busy,
        MissingLayers,
        RouteNotReady,
        NextHopFailed,
        NextHopTimeout,
        BrokenNode,
    )
}
_RETRY_AFTER_SECONDS = {
    MissingLayers.code: 5.0,
    RouteNotReady.code: 2.0,
    KvFull.code: 1.0,
    Draining.code: 1.0,
    Busy.code: 1.0,
}


class ApiError(Exception):
    """An answer that is an error. `retry_after` is in seconds; `param` is the request field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        return error_object(self.message, self.status, code=self.code, param=self.param)

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        return headers | {"WWW-Authenticate": "Bearer"} if self.status == 401 else headers


def error_object(message: str, status: int, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": _type(status), "param": param, "code": code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unauthenticated() -> ApiError:
    message = (
        "This gateway wants the token of its mesh: `Authorization: Bearer TOKEN`. Clients of the OpenAI API send it if "
        "it is their api_key."
    )
    return ApiError(401, message, code="invalid_api_key")


def from_mesh_error(error: MeshnetError) -> ApiError:
    """For errors raised in this process."""
    return from_code(error.code, str(error), error.retry_after if isinstance(error, Busy) else None)


def from_code(code: str, message: str, retry_after: float | None = None) -> ApiError:
    """For errors that an entry node sent: `code` is the stable name of one of the mesh's errors."""
    status = _STATUS.get(code, 502 if code == Unregistered.code else 500)
    wait = retry_after if retry_after is not None else _RETRY_AFTER_SECONDS.get(code)
    name = "model_not_found" if code == UnknownModel.code else code
    return ApiError(status, message, code=name, retry_after=wait)


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
