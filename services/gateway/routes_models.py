"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from quart import Blueprint

from meshnet.topology import DeployedModel
from services.gateway.api_errors import ApiError
from services.gateway.service import Service


def blueprint(service: Service, created: int) -> Blueprint:
    """`created` is what every model says of its age, in seconds since 1970: when this gateway began to offer it."""
    routes = Blueprint("models", __name__)

    def describe(model: DeployedModel) -> dict[str, Any]:
        return {
            "id": model.model_id,
            "object": "model",
            "created": created,
            "owned_by": "meshnet",
            "context_length": model.context_length,
            "complete": service.topology.coverage(model.model_id).complete,
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        topology = service.topology
        return {"object": "list", "data": [describe(model) for _, model in sorted(topology.models.items())]}

    @routes.get("/v1/models/<path:model_id>")
    async def model(model_id: str) -> dict[str, Any]:
        topology = service.topology
        if model_id not in topology.models:
            known = ", ".join(sorted(topology.models)) or "none"
            raise ApiError(404, f"The model {model_id!r} does not exist. Models: {known}.", code="model_not_found")
        return describe(topology.models[model_id])

    return routes
