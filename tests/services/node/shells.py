"""Three nodes in one process, over real HTTP, with an executor that counts: what comes out says what was run.

A token is a row of 16-bit numbers; each layer adds one to the first. So after 12 layers token `t` has become `t + 12`,
and that is the token that is drawn next.
"""

from __future__ import annotations

import array
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshnet.errors import PositionMismatch
from meshnet.logprobs import TokenLogprobs
from meshnet.model import LayerRange, Quantization
from meshnet.topology import Topology
from services.node.config import NodeConfig
from services.node.core.batching import BLOCK_ROWS
from services.node.core.choices import Choice
from services.node.core.sessions import SessionTable
from services.node.core.shards import ShardTable
from services.node.core.speculation import NewLimit, no_drafts
from services.node.core.work import (
    Buffer,
    CacheWork,
    ForwardWork,
    FreeWork,
    KeepWork,
    PromptWork,
    Result,
    ReuseWork,
    SampleWork,
    ScoreWork,
    SessionKey,
    ShardSpec,
    Work,
    rows_of,
)
from services.node.entry import EntryPoint
from services.node.forwarding import Forwarding
from services.node.http_server import HttpServer
from services.node.peers import Peers
from services.node.prober import Prober
from services.node.runner import Runner
from tests import models

WIDTH = 8
NUM_LAYERS = 12
VOCABULARY = 100
SPLITS = {"a": (0, 4), "b": (4, 8), "c": (8, 12)}


def next_token(hidden: Buffer) -> int:
    return memoryview(hidden).cast("B").cast("H")[0] % VOCABULARY


def logprobs(hidden: Buffer, token: int, num_top: int) -> TokenLogprobs:
    """They say which token it was and what was expected."""
    first = next_token(hidden)
    return TokenLogprobs(-float(token), tuple(((first + index) % VOCABULARY, 0.0 - index) for index in range(num_top)))


@dataclass
class CountingExecutor:
    """Also checks that the works of each session arrive in order. `gate` closed holds every step back.

    `cached`: lengths of KV caches, `held`: the tokens in them. `seen`: tokens that each session had at last, `num_run`:
    how many tokens have been run.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    cached: dict[SessionKey, int] = field(default_factory=dict)
    held: dict[SessionKey, list[int]] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=dict)
    num_run: int = 0
    busy_chunk_tokens: int = BLOCK_ROWS
    lacking: set[SessionKey] = field(default_factory=set)
    steps: list[int] = field(default_factory=list)
    fail: Exception | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def load(self, spec: object, progress: object) -> object:
        raise NotImplementedError

    attach = detach = load

    def run(self, batch: Sequence[Work]) -> list[Result]:
        assert self.gate.wait(20)
        if self.fail:
            raise self.fail
        self.steps.append(len(batch))
        return [self._run(work) for work in batch]

    def _run(self, work: Work) -> Result:
        match work:
            case FreeWork() | KeepWork() | ReuseWork():
                return self._manage(work)
            case SampleWork():
                token = next_token(work.hidden)
                asked = work.top_logprobs is not None
                return Choice(token, logprobs(work.hidden, token, work.top_logprobs or 0) if asked else None)
            case ScoreWork():
                scored = zip(rows_of(work.hidden, len(work.targets)), work.targets, strict=True)
                return tuple(logprobs(row, target, work.top_logprobs) for row, target in scored)
            case PromptWork():
                rows = array.array("H", [value for token in work.token_ids for value in (token, *[0] * (WIDTH - 1))])
            case ForwardWork():
                rows = array.array("H", bytes(work.hidden))
        kept = array.array("H")
        start = 0
        for segment in work.segments:
            if segment.key in self.lacking and segment.position > self.cached.get(segment.key, 0):
                return PositionMismatch("it could not be reused", 0)
            assert segment.position <= self.cached.get(segment.key, 0), (segment, self.cached)
            before = self.held.get(segment.key, [])[: segment.position]
            tokens = rows[start * WIDTH : (start + segment.num_tokens) * WIDTH : WIDTH]
            self._hold(segment.key, [*before, *(token - segment.key.layers.start for token in tokens)])
            self.seen[segment.key.session] = self.held[segment.key]
            self.num_run += segment.num_tokens
            for row in range(start, start + segment.num_tokens):
                rows[row * WIDTH] += len(work.layers)
            start += segment.num_tokens
            kept += rows[(start - segment.num_returned) * WIDTH : start * WIDTH]
        return kept.tobytes()

    def _manage(self, work: CacheWork) -> Result:
        match work:
            case FreeWork():
                for key in work.keys:
                    self.cached.pop(key, None)
                    self.held.pop(key, None)
            case KeepWork():
                assert work.num_kept <= self.cached[work.key]
                self._hold(work.key, self.held[work.key][: work.num_kept])
            case ReuseWork():
                return self._reuse(work)
        return None

    def _hold(self, key: SessionKey, tokens: list[int]) -> None:
        self.held[key], self.cached[key] = tokens, len(tokens)

    def _reuse(self, work: ReuseWork) -> Result:
        if (cached := self.cached.get(work.source, 0)) < work.num_reused:
            self.lacking.add(work.target)
            return PositionMismatch("not kept", cached)
        self._hold(work.target, self.held[work.source][: work.num_reused])
        if work.take:
            del self.held[work.source], self.cached[work.source]
        return None


@dataclass
class Shell:
    """One node without tracker and gRPC. `given_up`: models whose layers it would serve no more."""

    config: NodeConfig
    executor: CountingExecutor
    forwarding: Forwarding
    prober: Prober
    entry: EntryPoint
    server: HttpServer
    given_up: list[str]

    @property
    def sessions(self) -> SessionTable:
        return self.forwarding.sessions


@contextlib.asynccontextmanager
async def three_nodes(
    kv_tokens: int = 2048,
    splits: Mapping[str, tuple[int, int]] = SPLITS,
    new_limit: NewLimit = no_drafts,
    new_executor: Callable[[], CountingExecutor] | None = None,
    **options: Any,
) -> AsyncIterator[dict[str, Shell]]:
    """Nodes a, b, c with four layers each, or others. Ends with an integrity check of all."""
    snapshot: list[Topology] = [Topology()]
    shells: dict[str, Shell] = {}
    nodes = []
    async with contextlib.AsyncExitStack() as stack:
        for node_id, layers in splits.items():
            executor = (new_executor or CountingExecutor)()
            spec = ShardSpec(
                models.manifest("m", NUM_LAYERS, WIDTH), LayerRange(*layers), Quantization.BFLOAT16, kv_tokens
            )
            config = NodeConfig(node_id, "", "", "", "", 0, Quantization.BFLOAT16, **options)
            shell = make_shell(config, spec, snapshot, executor, new_limit)
            stack.push_async_callback(close, shell)
            address = await shell.server.start("127.0.0.1:0")
            shells[node_id] = shell
            nodes.append(replace(models.node(node_id, layers), forward_address=address))
        snapshot[0] = models.topology(*nodes, num_layers=NUM_LAYERS)
        yield shells
        for shell in shells.values():
            shell.sessions.check_integrity()
            shell.entry.check_integrity()


def make_shell(
    config: NodeConfig, spec: ShardSpec, snapshot: list[Topology], executor: Any, new_limit: NewLimit = no_drafts
) -> Shell:
    """A node that holds one shard, which `executor` serves already. It knows the topology in `snapshot`."""
    shards, sessions = ShardTable(), SessionTable()
    shards.add(spec)
    model_id = spec.manifest.model_id
    sessions.ledger(model_id).add_layers(spec.layers, spec.kv_tokens)
    peers = Peers(lambda: snapshot[0], config.compression, config.hop_timeout)
    given_up: list[str] = []
    forwarding = Forwarding(
        shards,
        sessions,
        Runner(executor),
        peers,
        config.reorder_timeout,
        node_id=config.node_id,
        keeps=config.prefix_reuse,
        on_broken=given_up.append,
    )
    prober = Prober(config.node_id, forwarding, lambda: snapshot[0], config.probe_timeout, lambda: None)
    entry = EntryPoint(config, forwarding, prober, new_limit)
    return Shell(config, executor, forwarding, prober, entry, HttpServer(config, forwarding, dict), given_up)


async def close(shell: Shell) -> None:
    if isinstance(shell.executor, CountingExecutor):
        shell.executor.gate.set()
    await shell.entry.stop()
    await shell.server.stop()
    await shell.forwarding.peers.close()
    shell.forwarding.runner.stop()
