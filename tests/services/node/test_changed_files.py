"""Files that change under a running node: found before a shard is loaded from them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Topology
from services.node.config import NodeConfig
from services.node.core.compression import Compression
from services.node.core.sessions import SessionTable
from services.node.core.shards import ShardTable
from services.node.directive_worker import DirectiveWorker
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from services.node.forwarding import Forwarding
from services.node.peers import Peers
from services.node.runner import Runner
from tests.services.node.engine.models import MODEL, TINY, save_model


def load(layers: LayerRange) -> Directive:
    return Directive(str(layers), "n", DirectiveKind.LOAD_SHARD, MODEL, layers, 1, "test", kv_tokens=128)


def exchange(folder: Path) -> None:
    """Other values in the last tensor of the weight file, as another fine-tune has them."""
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-64:] = bytes(64)
    weights.write_bytes(content)


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])


@pytest.mark.parametrize(
    ("change", "failure"), [(exchange, "have changed since this node started"), (truncate, "model.safetensors")]
)
async def test_nothing_is_loaded_from_files_that_have_changed(tmp_path: Path, change: object, failure: str) -> None:
    files = save_model(tmp_path, TINY["llama"])
    config = NodeConfig("n", "", "", "", "", 10**9, Quantization.BFLOAT16, models={MODEL: files})
    peers = Peers(Topology, Compression.OFF, 1.0)
    forwarding = Forwarding(ShardTable(), SessionTable(), Runner(TorchExecutor({MODEL: files})), peers, 1.0)
    final: asyncio.Queue[Directive] = asyncio.Queue()

    async def report(directive: Directive) -> None:
        if directive.state.is_final:
            final.put_nowait(directive)

    worker = DirectiveWorker(config, {MODEL: read_manifest(files)}, forwarding, report, asyncio.Lock())
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(60):
            await worker.accept(load(LayerRange(0, 2)))
            assert (await final.get()).state is DirectiveState.READY
            assert callable(change)
            change(tmp_path)
            await worker.accept(load(LayerRange(2, 4)))
            failed = await final.get()
        assert (failed.state, failed.failure_kind) == (DirectiveState.FAILED, FailureKind.BAD_FILES)
        assert failure in failed.failure
        assert [shard.layers for shard in forwarding.shards.listing()] == [LayerRange(0, 2)]
    finally:
        running.cancel()
        await peers.close()
        forwarding.runner.stop()
