"""Limits of the application that take more clients than a test should start."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from services.gateway.app import GatewayApp, create_app
from services.gateway.config import GatewayConfig
from services.gateway.mesh_client import MeshClient
from services.gateway.server import protocol_config
from services.gateway.service import Service
from services.gateway.tokenizers_store import TokenizerStore


@pytest.fixture
async def full() -> AsyncIterator[GatewayApp]:
    """An app that may serve no request."""
    config = GatewayConfig("127.0.0.1:1", "127.0.0.1", 0, {}, max_requests_in_flight=0)
    tokenizers = TokenizerStore({})
    yield create_app(Service(MeshClient(config.tracker, 1), tokenizers), config, 0)
    tokenizers.close()


async def test_more_requests_than_allowed_are_told_to_come_again(full: GatewayApp) -> None:
    response = await full.test_client().post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert response.status_code == 429
    assert response.headers["Retry-After"] == "1"
    assert (await response.get_json())["error"]["type"] == "rate_limit_error"


async def test_a_full_gateway_still_tells_its_health(full: GatewayApp) -> None:
    response = await full.test_client().get("/health")
    assert response.status_code == 503
    assert (await response.get_json())["error"]["code"] == "no_topology"


async def test_a_fault_in_a_route_is_a_500_as_json(full: GatewayApp) -> None:
    @full.get("/fault")
    async def fault() -> str:
        raise RuntimeError("a secret")

    response = await full.test_client().get("/fault")
    assert response.status_code == 500
    error = (await response.get_json())["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal")
    assert "secret" not in error["message"]


def test_idle_connections_outlive_the_pools_of_clients() -> None:
    config = protocol_config(GatewayConfig("127.0.0.1:1", "127.0.0.1", 0, {}))
    assert config.keep_alive_timeout >= 75
