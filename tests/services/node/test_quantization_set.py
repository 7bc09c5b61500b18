"""A node that prefers bfloat16 takes a shard at int8 by directive, and serves both as one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshnet.directive import Directive, DirectiveKind, DirectiveState, FailureKind
from meshnet.model import LayerRange, Quantization
from meshnet.topology import ShardState, Topology
from services.node.config import NodeConfig
from services.node.core.compression import Compression
from services.node.core.sessions import SessionTable
from services.node.core.shards import ShardTable
from services.node.core.work import PromptWork, Segment, SessionKey
from services.node.directive_worker import DirectiveWorker
from services.node.engine.executor import TorchExecutor
from services.node.files.manifest import read_manifest
from services.node.forwarding import Forwarding
from services.node.peers import Peers
from services.node.runner import Runner
from tests.parity import Reference
from tests.services.node.engine.models import MODEL, TINY, prompt_of, save_model
from tests.services.node.engine.rounded import likeness, requantized

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

Q, S = Quantization, DirectiveState
KV_TOKENS = 256
FIRST, SECOND, ALL = LayerRange(0, 2), LayerRange(2, 4), LayerRange(0, 4)


def load(layers: LayerRange, quantization: Quantization) -> Directive:
    return Directive(
        *(f"{layers} {quantization}", "n", DirectiveKind.LOAD_SHARD, MODEL, layers, 1, "test"),
        quantization=quantization,
        kv_tokens=KV_TOKENS,
    )


async def test_shards_of_one_model_may_differ_in_quantization(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["llama"])
    manifest = read_manifest(files)
    executor = TorchExecutor({MODEL: files})
    config = NodeConfig("n", "", "", "", "", 10**9, Q.BFLOAT16, fallbacks=(Q.INT8,))
    peers = Peers(Topology, Compression.OFF, 1.0)
    forwarding = Forwarding(ShardTable(), SessionTable(), Runner(executor), peers, 1.0)
    final: asyncio.Queue[Directive] = asyncio.Queue()

    async def report(directive: Directive) -> None:
        if directive.state.is_final:
            final.put_nowait(directive)

    worker = DirectiveWorker(config, {MODEL: manifest}, forwarding, report, asyncio.Lock())
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(60):
            for directive in (load(FIRST, Q.BFLOAT16), load(SECOND, Q.NF4), load(SECOND, Q.INT8)):
                await worker.accept(directive)
            ended = [await final.get() for _ in range(3)]
        assert [directive.state for directive in ended] == [S.READY, S.FAILED, S.READY]
        assert ended[1].failure == "this node stores weights at bfloat16, int8, not at nf4"
        assert ended[1].failure_kind is FailureKind.OTHER
        check_accounts(forwarding)
        prompt = prompt_of(40)
        segment = Segment(SessionKey("s", MODEL, ALL), 0, len(prompt), 1)
        row = await forwarding.run(PromptWork(MODEL, ALL, (segment,), tuple(prompt)))
        wanted = requantized(Reference(tmp_path), Q.INT8, SECOND).logits(prompt)[-1]
        assert likeness(row, wanted, executor.entry(MODEL)) > 0.999
    finally:
        running.cancel()
        await peers.close()
        forwarding.runner.stop()


def check_accounts(forwarding: Forwarding) -> None:
    shards, ledger = forwarding.shards, forwarding.sessions.ledger(MODEL)
    held = ((FIRST, Q.BFLOAT16), (SECOND, Q.INT8))
    assert [(shard.layers, shard.quantization, shard.state) for shard in shards.listing()] == [
        (layers, quantization, ShardState.READY) for layers, quantization in held
    ]
    manifest = shards.manifest(MODEL)
    assert shards.held_bytes() == sum(manifest.shard_bytes(*shard, KV_TOKENS) for shard in held)
    assert ledger.capacity_tokens == ledger.free_tokens == KV_TOKENS
    assert (shards.workspace_bytes() or 0) > 0
    forwarding.sessions.check_integrity()
