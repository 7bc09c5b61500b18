"""Nodes with torch behind the sockets, all in one process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from meshnet.model import KvPrecision, LayerRange, Quantization
from meshnet.model_files import ModelFiles
from meshnet.topology import DeployedModel, Node, Shard, ShardState, Topology
from services.node.config import NodeConfig
from services.node.core.speculation import NewLimit
from services.node.core.work import ShardSpec
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from tests.e2e.tiny import NUM_LAYERS
from tests.services.node.shells import Shell, close, make_shell
from tests.services.node.test_generation import until

MODEL = "tiny"
KV_TOKENS = 4096


@contextlib.asynccontextmanager
async def torch_nodes(
    files: ModelFiles,
    ends: tuple[int, ...],
    new_limit: NewLimit,
    kv_precision: KvPrecision = KvPrecision.BFLOAT16,
    quantization: Quantization = Quantization.BFLOAT16,
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
            spec = ShardSpec(manifest, layers, quantization, KV_TOKENS, kv_precision)
            executor = TorchExecutor({MODEL: files})
            executor.attach(executor.load(spec, lambda done, total: None))
            config = NodeConfig(f"n{index}", "", "", "", "", 0, quantization)
            shell = make_shell(config, spec, snapshot, executor, new_limit)
            stack.push_async_callback(close, shell)
            address = await shell.server.start("127.0.0.1:0")
            shard = Shard(MODEL, layers, quantization, ShardState.READY)
            nodes[config.node_id] = Node(
                config.node_id, address, "127.0.0.1:2", 0, quantization, shards=(shard,),
                available_models=frozenset({MODEL}),
            )  # fmt: skip
            shells.append(shell)
        snapshot[0] = Topology(1, nodes, {MODEL: DeployedModel(manifest, KV_TOKENS)})
        yield shells
        await until(lambda: all(len(shell.sessions) == 0 for shell in shells))
        for shell in shells:
            shell.sessions.check_integrity()
            shell.executor.check_integrity()  # type: ignore[attr-defined]
