"""The OpenAPI document: schemas from the models of requests and answers, paths by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import meshnet
from services.gateway.api import answers
from services.gateway.api.chat import ChatRequest
from services.gateway.api.completions import CompletionRequest
from services.gateway.api.responses import ResponsesRequest
from services.gateway.api.tokenize import DetokenizeRequest, TokenizeRequest

_REFERENCE = "#/components/schemas/{model}"

_ERRORS = {
    400: "The request is wrong: `param` names the field.",
    401: "The mesh has a token, and the request does not show it.",
    404: "There is no such model. The message names those that there are.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The Content-Type is not JSON.",
    429: "There is no room now: `Retry-After` says when to come again.",
    500: "A fault of the server.",
    502: "A node failed.",
    503: "The model cannot answer now: layers are missing, no route is ready, or the tracker was not heard yet.",
    504: "A node, or the whole generation, took too long.",
}
_READ = (401, 503)
_WRITE = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_GENERATE = (*_WRITE, 502, 504)


@dataclass(frozen=True, slots=True)
class Operation:
    """`answer` None: text of the content type. `streams`: also as server-sent events, if asked for."""

    method: str
    summary: str
    answer: type[BaseModel] | None
    errors: tuple[int, ...] = ()
    request: type[BaseModel] | None = None
    streams: bool = False
    content_type: str = "application/json"
    path_parameter: str | None = None


OPERATIONS: Mapping[str, Operation] = {
    "/v1/chat/completions": Operation(
        "post", "Answers a conversation.", answers.ChatCompletion, _GENERATE, ChatRequest, streams=True
    ),
    "/v1/completions": Operation(
        "post", "Goes on with texts.", answers.Completion, _GENERATE, CompletionRequest, streams=True
    ),
    "/v1/responses": Operation(
        "post",
        "Answers a conversation, of which nothing is kept.",
        answers.Response,
        _GENERATE,
        ResponsesRequest,
        streams=True,
    ),
    "/v1/models": Operation("get", "The models of the mesh.", answers.ModelList, _READ),
    "/v1/models/{model_id}": Operation("get", "One model.", answers.Model, (404, *_READ), path_parameter="model_id"),
    "/tokenize": Operation("post", "The tokens of a text or a conversation.", answers.Tokens, _WRITE, TokenizeRequest),
    "/detokenize": Operation("post", "The text of tokens.", answers.Detokenized, _WRITE, DetokenizeRequest),
    "/health": Operation("get", "Whether every model answers.", answers.Health, (503,)),
    "/v1/mesh/coverage": Operation("get", "The coverage map.", answers.Coverage, _READ),
    "/metrics": Operation("get", "What Prometheus scrapes.", None, (401,), content_type="text/plain"),
    "/openapi.json": Operation("get", "This document.", None, (401,)),
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    models: list[type[BaseModel]] = [answers.Error]
    models += [model for operation in OPERATIONS.values() for model in (operation.request, operation.answer) if model]
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "meshnet gateway", "version": meshnet.__version__},
        "paths": {path: {operation.method: _operation(operation)} for path, operation in OPERATIONS.items()},
        "components": {"schemas": schemas["$defs"]},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": _success(operation), **{str(status): _error(status) for status in operation.errors}},
    }
    if operation.request is not None:
        content = {"application/json": {"schema": _reference(operation.request)}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.path_parameter is not None:
        parameter = {"name": operation.path_parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    return described


def _success(operation: Operation) -> dict[str, Any]:
    schema = _reference(operation.answer) if operation.answer is not None else {}
    content: dict[str, Any] = {operation.content_type: {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {}
    return {"description": "As asked.", "content": content}


def _error(status: int) -> dict[str, Any]:
    described = {
        "description": _ERRORS[status],
        "content": {"application/json": {"schema": _reference(answers.Error)}},
    }
    if status == 429:
        described["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return described


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}
