"""`GET /health`, `GET /v1/mesh/coverage` and `GET /metrics`."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, Response

from meshnet.security.shared_secret import SharedSecret
from services.gateway import coverage, metrics
from services.gateway.authentication import shows_secret
from services.gateway.service import Service

# Open to all: whether it lives is nobody's secret.
LIVENESS = "/health"


def blueprint(service: Service, secret: SharedSecret | None) -> Blueprint:
    routes = Blueprint("mesh", __name__)

    @routes.get(LIVENESS)
    async def health() -> dict[str, Any]:
        health = coverage.health(service.topology, service.mesh.tracker_connected)
        # What it serves is for those who may use it.
        return health if shows_secret(secret) else health | {"models": {}}

    @routes.get("/v1/mesh/coverage")
    async def coverage_map() -> dict[str, Any]:
        return coverage.coverage_map(service.topology)

    @routes.get("/metrics")
    async def prometheus() -> Response:
        return Response(service.metrics.text(), content_type=metrics.CONTENT_TYPE)

    return routes
