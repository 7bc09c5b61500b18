"""The bodies of requests."""

from __future__ import annotations

from quart import request

from services.gateway.api_errors import ApiError


async def json_body() -> bytes:
    """The body of a request that says it is JSON, or says nothing. Raises ApiError (415)."""
    if request.mimetype and request.mimetype != "application/json" and not request.mimetype.endswith("+json"):
        raise ApiError(
            415,
            f"The Content-Type must be application/json, not {request.mimetype[:80]}.",
            code="unsupported_media_type",
        )
    body: bytes = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    return body
