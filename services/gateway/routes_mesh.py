"""`GET /health`, `GET /v1/mesh/coverage` and `GET /metrics`."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, Response

from services.gateway import coverage, metrics
from services.gateway.service import Service


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("mesh", __name__)

    @routes.get("/health")
    async def health() -> dict[str, Any]:
        return coverage.health(service.topology, service.mesh.tracker_connected)

    @routes.get("/v1/mesh/coverage")
    async def coverage_map() -> dict[str, Any]:
        return coverage.coverage_map(service.topology)

    @routes.get("/metrics")
    async def prometheus() -> Response:
        return Response(service.metrics.text(), content_type=metrics.CONTENT_TYPE)

    return routes
