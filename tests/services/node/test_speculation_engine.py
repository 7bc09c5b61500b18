"""Drafts with torch behind the sockets: a model in bfloat16 says the same to the token, with drafts and without."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from meshnet.model import KvPrecision, LayerRange, Quantization
from meshnet.model_files import ModelFiles
from meshnet.topology import DeployedModel, Node, Shard, ShardState, Topology
from services.node.config import NodeConfig
from services.node.core.speculation import FixedLimit, NewLimit, no_drafts
from services.node.core.work import Sampling, ShardSpec
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from services.node.generation import GenerationRequest
from tests.e2e.tiny import NUM_LAYERS, save_tiny_llama
from tests.services.node.shells import Shell, close, make_shell
from tests.services.node.test_generation import run, until

MODEL = "tiny"
KV_TOKENS = 4096


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(MODEL, save_tiny_llama(tmp_path_factory.mktemp("tiny"), initializer_range=0.05))


@contextlib.asynccontextmanager
async def torch_nodes(
    files: ModelFiles, ends: tuple[int, ...], new_limit: NewLimit, kv_precision: KvPrecision
) -> AsyncIterator[list[Shell]]:
    """A node for each of the ranges of layers that end there, over real sockets."""
    manifest = read_manifest(files)
    bounds = (0, *ends, NUM_LAYERS)
    snapshot: list[Topology] = [Topology()]
    shells: list[Shell] = []
    nodes: dict[str, Node] = {}
    async with contextlib.AsyncExitStack() as stack:
        for index, start in enumerate(bounds[:-1]):
            layers = LayerRange(start, bounds[index + 1])
            spec = ShardSpec(manifest, layers, Quantization.BFLOAT16, KV_TOKENS, kv_precision)
            executor = TorchExecutor({MODEL: files})
            executor.attach(executor.load(spec, lambda done, total: None))
            config = NodeConfig(f"n{index}", "", "", "", "", 0, Quantization.BFLOAT16)
            shell = make_shell(config, spec, snapshot, executor, new_limit)
            stack.push_async_callback(close, shell)
            address = await shell.server.start("127.0.0.1:0")
            shard = Shard(MODEL, layers, Quantization.BFLOAT16, ShardState.READY)
            nodes[config.node_id] = Node(
                config.node_id, address, "127.0.0.1:2", 0, Quantization.BFLOAT16, shards=(shard,),
                available_models=frozenset({MODEL}),
            )  # fmt: skip
            shells.append(shell)
        snapshot[0] = Topology(1, nodes, {MODEL: DeployedModel(manifest, KV_TOKENS)})
        yield shells
        await until(lambda: all(len(shell.sessions) == 0 for shell in shells))
        for shell in shells:
            shell.sessions.check_integrity()
            shell.executor.check_integrity()  # type: ignore[attr-defined]


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
