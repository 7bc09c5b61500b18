"""Drafts with torch behind the sockets: a model in bfloat16 says the same to the token, with drafts and without."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

import pytest

from meshnet.model import KvPrecision
from meshnet.model_files import ModelFiles
from services.node.core.request import GenerationRequest
from services.node.core.speculation import FixedLimit, no_drafts
from services.node.core.work import Sampling
from tests.e2e.tiny import save_tiny_llama
from tests.services.node.shells import Shell
from tests.services.node.test_generation import run
from tests.services.node.torch_nodes import MODEL, torch_nodes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(MODEL, save_tiny_llama(tmp_path_factory.mktemp("tiny"), initializer_range=0.05))


def prompts(sampling: Sampling) -> list[GenerationRequest]:
    """Each says the same a few times, in tokens of its own. The model likes to repeat tokens."""
    return [
        GenerationRequest(
            str(uuid.uuid4()), MODEL, tuple(range(30 * index, 30 * index + 9 + index)) * 4, 20, sampling, seed=index
        )
        for index in range(8)
    ]


async def answers(shell: Shell, asked: list[GenerationRequest]) -> list[list[int]]:
    """Of all at once, and of the first alone."""
    fresh = [replace(one, request_id=str(uuid.uuid4())) for one in (*asked, asked[0])]
    together = await asyncio.gather(*(run(shell, one) for one in fresh[: len(asked)]))
    return [*together, *[await run(shell, one) for one in fresh[len(asked) :]]]


@pytest.mark.parametrize(
    ("ends", "kv_precision"), [((), KvPrecision.BFLOAT16), ((2,), KvPrecision.INT8), ((2, 4), KvPrecision.BFLOAT16)]
)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.3, top_k=4, top_p=0.98)])
async def test_tokens_are_the_same_with_drafts_and_without(
    files: ModelFiles, ends: tuple[int, ...], sampling: Sampling, kv_precision: KvPrecision
) -> None:
    asked = prompts(sampling)
    async with torch_nodes(files, ends, no_drafts, kv_precision) as nodes:
        plain = await answers(nodes[0], asked)
    async with torch_nodes(files, ends, lambda: FixedLimit(3), kv_precision) as nodes:
        assert await answers(nodes[0], asked) == plain
        counts = nodes[0].entry.draft_counts
        assert counts.accepted > 20
        assert not sampling.temperature or counts.accepted < counts.drafted
