"""`GET /health` and `GET /v1/mesh/coverage`."""

from __future__ import annotations

from typing import Any

from quart import Blueprint

from services.gateway import coverage
from services.gateway.service import Service


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("mesh", __name__)

    @routes.get("/health")
    async def health() -> dict[str, Any]:
        return coverage.health(service.topology, service.mesh.tracker_connected)

    @routes.get("/v1/mesh/coverage")
    async def coverage_map() -> dict[str, Any]:
        return coverage.coverage_map(service.topology)

    return routes
