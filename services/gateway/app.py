"""The Quart application: routes, limits, and errors as JSON on every path."""

from __future__ import annotations

import json
import logging
import uuid
from http import HTTPStatus
from typing import Any

from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from quart import Quart, Response, g, request
from werkzeug.exceptions import HTTPException

from meshnet.errors import MeshnetError
from services.gateway import routes_generation, routes_mesh, routes_models, routes_openapi, routes_tokenize
from services.gateway.api_errors import ApiError, error_object, from_mesh_error, unauthenticated
from services.gateway.authentication import shows_secret
from services.gateway.config import GatewayConfig
from services.gateway.metrics import Metrics
from services.gateway.service import Service

log = logging.getLogger(__name__)


class GatewayApp(Quart):
    """Counts the requests that run, streams until their last byte, and refuses more than it may."""

    num_requests = 0

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        self.num_requests += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.num_requests -= 1


def create_app(service: Service, config: GatewayConfig, created: int) -> GatewayApp:
    app = GatewayApp("meshnet.gateway", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes
    app.config["BODY_TIMEOUT"] = config.body_timeout
    # Else a stream is cut after a minute, with status 200. Generations have their own deadline.
    app.config["RESPONSE_TIMEOUT"] = None
    app.register_blueprint(routes_models.blueprint(service, created))
    app.register_blueprint(routes_generation.blueprint(service, config.stream_silence))
    app.register_blueprint(routes_tokenize.blueprint(service))
    app.register_blueprint(routes_openapi.blueprint())
    app.register_blueprint(routes_mesh.blueprint(service, config.secret))
    _add_request_hooks(app, config, service.metrics)
    _add_error_handlers(app)
    return app


def _add_request_hooks(app: GatewayApp, config: GatewayConfig, metrics: Metrics) -> None:
    max_requests = config.max_requests_in_flight

    @app.before_request
    async def admit() -> None:
        g.request_id = str(uuid.uuid4())
        if not (request.url_rule and request.url_rule.rule == routes_mesh.LIVENESS) and not shows_secret(config.secret):
            raise unauthenticated()
        if request.method == "POST" and app.num_requests > max_requests:
            raise ApiError(429, f"This gateway already serves {max_requests} requests.", code="busy", retry_after=1.0)

    @app.after_request
    async def name_and_count(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        route = None if request.url_rule is None else request.url_rule.rule
        metrics.answered(request.method, route, response.status_code)
        return response


def _add_error_handlers(app: Quart) -> None:
    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        return _json(error.body, error.status, error.headers)

    @app.errorhandler(MeshnetError)
    async def mesh_error(error: MeshnetError) -> Response:
        return await api_error(from_mesh_error(error))

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        status = error.code or 500
        body = error_object(f"{_reason(status, error)}", status, code=_code(status))
        kept = {name: value for name, value in error.get_headers() if name not in {"Content-Type", "Content-Length"}}
        return _json(body, status, kept)

    @app.errorhandler(Exception)
    async def unexpected(error: Exception) -> Response:
        log.error("request %s %s failed", request.method, request.path, exc_info=error)
        return _json(error_object("Internal error.", 500, code="internal"), 500)


def _reason(status: int, error: HTTPException) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return f"Unknown URL: {request.method} {request.path}"
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return f"Method {request.method} is not allowed for {request.path}"
    return error.description or HTTPStatus(status).phrase


def _code(status: int) -> str:
    return HTTPStatus(status).phrase.lower().replace(" ", "_").replace("-", "_")


def _json(body: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(
        json.dumps(body, ensure_ascii=False), status=status, headers=headers, content_type="application/json"
    )
