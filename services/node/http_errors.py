"""Errors of the activation plane, to and from HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from meshnet import wire
from meshnet.errors import (
    BadFrame,
    BrokenNode,
    Busy,
    CorruptFrame,
    Draining,
    FrameTooLarge,
    HopFailure,
    InvalidRequest,
    KvFull,
    MeshnetError,
    NextHopFailed,
    NextHopTimeout,
    NotFinite,
    PositionMismatch,
    Unauthenticated,
    UnknownModel,
    WireVersionMismatch,
    WrongLayers,
)

_PLAIN: dict[str, type[MeshnetError]] = {
    kind.code: kind
    for kind in (
        BadFrame, CorruptFrame, FrameTooLarge, InvalidRequest, NotFinite, UnknownModel, WireVersionMismatch, WrongLayers
    )
}  # fmt: skip
_HOP_FAILURES: dict[str, type[HopFailure]] = {kind.code: kind for kind in (BrokenNode, NextHopFailed, NextHopTimeout)}
_MAX_MESSAGE_CHARS = 2000
_CACHED_LENGTH, _FAILED_NODE = wire.CACHED_LENGTH.lower(), wire.FAILED_NODE.lower()


def error_body(error: MeshnetError, node_id: str) -> bytes:
    return json.dumps({"error": {"code": error.code, "message": str(error), "node": _node(error, node_id)}}).encode()


def error_headers(error: MeshnetError) -> dict[str, str]:
    """Headers of an error answer, beside its content type."""
    headers = {wire.VERSION: str(wire.WIRE_VERSION)}
    if isinstance(error, PositionMismatch):
        headers[wire.CACHED_LENGTH] = str(error.cached_length)
    if isinstance(error, Busy):
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, HopFailure):
        headers[wire.FAILED_NODE] = error.node_id
    return headers


def error_from_answer(status: int, headers: Mapping[str, str], body: bytes, node_id: str) -> MeshnetError:
    """The error that a hop answered with; names of its headers are lower-case. Whatever does not look like one of ours
    blames the hop itself."""
    code, message, node = _parse(body)
    said = f"{message} (node {node or node_id})"
    if code == PositionMismatch.code:
        return PositionMismatch(said, _integer(headers.get(_CACHED_LENGTH)))
    if code in {KvFull.code, Draining.code}:
        kind = KvFull if code == KvFull.code else Draining
        return kind(said, float(_integer(headers.get("retry-after")) or 1))
    if code in _HOP_FAILURES:
        return _HOP_FAILURES[code](message, headers.get(_FAILED_NODE) or node_id)
    if code in _PLAIN:
        return _PLAIN[code](said)
    return NextHopFailed(f"node {node_id} answered HTTP {status}: {message}", node_id)


def _node(error: MeshnetError, node_id: str) -> str:
    return error.node_id if isinstance(error, HopFailure) else node_id


def _parse(body: bytes) -> tuple[str, str, str]:
    try:
        error: Any = json.loads(body)["error"]
        return str(error["code"]), str(error["message"])[:_MAX_MESSAGE_CHARS], str(error.get("node", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", body[:200].decode("utf-8", "replace"), ""


def _integer(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
