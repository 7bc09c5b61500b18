"""A gateway on a fake mesh that several files of tests share. Others have fixtures of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from meshnet.model_files import ModelFiles
from services.gateway.tokenization import ModelTokenizer, load_tokenizer
from tests.processes import wait_until
from tests.services.gateway.fake_mesh import FakeMesh, model, shard, tokens
from tests.services.gateway.gateway_process import Gateway, running_gateway

END = 2


@pytest.fixture(scope="session")
def tokenizer(smollm2_gguf: Path) -> ModelTokenizer:
    return load_tokenizer(ModelFiles("smol", smollm2_gguf))


@pytest.fixture(scope="session")
def shared(smollm2_gguf: Path) -> Iterator[tuple[FakeMesh, Gateway]]:
    """One entry node, "a", with a route for the model "smol"."""
    with FakeMesh() as mesh:
        mesh.tell(mesh.a.node(shard("smol")), smol=model("smol"))
        arguments = ("--tracker", mesh.address, "--model", f"smol={smollm2_gguf}")
        with running_gateway(*arguments) as gateway:
            wait_until(lambda: httpx.get(f"{gateway.url}/health").status_code == 200)
            yield mesh, gateway


@pytest.fixture
def mesh(shared: tuple[FakeMesh, Gateway]) -> FakeMesh:
    mesh, _ = shared
    mesh.a.requests.clear()
    mesh.a.script = tokens(END)
    return mesh


@pytest.fixture
def gateway(shared: tuple[FakeMesh, Gateway], mesh: FakeMesh) -> Gateway:
    return shared[1]


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
