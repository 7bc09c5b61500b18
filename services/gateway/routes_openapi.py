"""`GET /openapi.json`."""

from __future__ import annotations

import json

from quart import Blueprint, Response

from services.gateway.openapi import document


def blueprint() -> Blueprint:
    routes = Blueprint("openapi", __name__)
    body = json.dumps(document())

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return Response(body, content_type="application/json")

    return routes
