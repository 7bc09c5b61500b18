"""KV caches that begin with what others have left: the same bits as without, and two accounts of room that agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import KvFull, PositionMismatch
from meshnet.model import KvPrecision, Quantization, blocks_for
from meshnet.wire import Prefix
from services.node.core.sessions import Piece, SessionTable
from services.node.core.work import CacheWork, FreeWork, KeepWork, ReuseWork, SessionKey
from services.node.engine.caches import KvCaches
from services.node.engine.kv_pool import LayerPool
from tests.services.node.engine.models import MODEL, TINY, Mesh, mesh, prompt_of, run, save_model, splits_of
from tests.services.node.engine.test_kv_cache import FORMATS, LAYERS, tokens

KINDS = ("llama", "gpt2", "gemma3", "mistral-window", "falcon-multi-query", "llama3-rope", "qwen3_moe", "gpt_oss")


def manage(shards: Mesh, work: Callable[[Callable[[str], SessionKey]], CacheWork]) -> None:
    """Does something with the caches of sessions in all shards."""
    for executor, layers in shards.shards:
        run(executor, [work(lambda session, layers=layers: SessionKey(session, MODEL, layers))])  # type: ignore[misc]
        executor.check_integrity()


def chunked(shards: Mesh, session: str, ids: Sequence[int], begin: int = 0) -> bytes:
    """The prompt's hidden states from `begin` on, in chunks of 128."""
    return b"".join(
        bytes(shards.rows({session: ids[start : start + 128]}, {session: start})[session])
        for start in range(begin, len(ids), 128)
    )


@pytest.mark.parametrize("kv_precision", list(KvPrecision))
@pytest.mark.parametrize("quantization", [Quantization.BFLOAT16, Quantization.FLOAT32])
@pytest.mark.parametrize("kind", KINDS)
def test_copied_and_taken_caches_give_the_same_bits(
    tmp_path: Path, kind: str, quantization: Quantization, kv_precision: KvPrecision
) -> None:
    files = save_model(tmp_path, TINY[kind])
    first, other, third = prompt_of(300, 1), prompt_of(150, 2), prompt_of(90, 3)
    branch, longer = [*first[:128], *other], [*first[:256], *third]
    with mesh(files, splits_of(4, 2), quantization, kv_tokens=2048, kv_precision=kv_precision) as shards:
        wanted_branch = chunked(shards, "alone", branch)
        wanted_longer = chunked(shards, "alone-too", longer)
        chunked(shards, "first", first)
        manage(shards, lambda key: KeepWork(key("first"), 256))
        manage(shards, lambda key: ReuseWork(key("first"), key("branch"), 128, take=False))
        row = len(wanted_branch) // len(branch)
        assert chunked(shards, "branch", branch, 128) == wanted_branch[128 * row :]
        manage(shards, lambda key: ReuseWork(key("first"), key("longer"), 256, take=True))
        assert chunked(shards, "longer", longer, 256) == wanted_longer[256 * row :]
        # Taking left the copy as it was, and decoding goes on.
        steps = [shards.step({session: [7]}, {session: len(branch)})[session] for session in ("alone", "branch")]
        assert bytes(steps[0]) == bytes(steps[1])
        shards.free("alone", "alone-too", "branch", "longer")
        assert all(executor.num_kv_blocks == 0 for executor, _ in shards.shards)


def test_what_is_kept_takes_whole_blocks_and_what_is_not_there_is_refused(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["llama"])
    with mesh(files, splits_of(4), kv_tokens=1024) as shards:
        executor, layers = shards.shards[0]
        key, other = SessionKey("a", MODEL, layers), SessionKey("b", MODEL, layers)
        chunked(shards, "a", prompt_of(300, 1))
        assert executor.num_kv_blocks == 4 * 3
        run(executor, [KeepWork(key, 128), KeepWork(other, 128)])
        assert executor.num_kv_blocks == 4
        (refused,) = executor.run([ReuseWork(key, other, 256, take=False)])
        assert isinstance(refused, PositionMismatch)
        assert refused.cached_length == 128
        (refused, freed) = executor.run([ReuseWork(other, key, 128, take=True), FreeWork((key,))])
        assert isinstance(refused, PositionMismatch)
        assert freed is None
        executor.check_integrity()
        assert executor.num_kv_blocks == 0


class Node:
    """A session table and the caches that it speaks for, small, of three layers of which sessions may use some."""

    def __init__(self, num_blocks: int, kind: str) -> None:
        self.table = SessionTable()
        self.table.ledger("m").add_layers(LAYERS, num_blocks * 128)
        self.caches = KvCaches()
        pools = {layer: LayerPool(num_blocks, FORMATS[kind], torch.device("cpu")) for layer in LAYERS.layers}
        self.caches.add_layers("m", pools)
        self.format = FORMATS[kind]
        self.contents: dict[SessionKey, torch.Tensor] = {}
        self.stamp = 0

    def hand_over(self) -> None:
        """Does what the table says; none of it may fail."""
        for work in self.table.take_works():
            match work:
                case FreeWork():
                    self.caches.free(work.keys)
                    for key in work.keys:
                        self.contents.pop(key, None)
                case KeepWork():
                    self.caches.keep(work.key, work.num_kept)
                    self.contents[work.key] = self.contents[work.key][: work.num_kept]
                case ReuseWork():
                    self.caches.reuse(work.source, work.target, work.num_reused, take=work.take)
                    self.contents[work.target] = self.contents[work.source][: work.num_reused]
                    if work.take:
                        del self.contents[work.source]

    def write(self, key: SessionKey, position: int, count: int) -> None:
        self.caches.reserve({key: position + count})
        cache = self.caches.begin(key, position)
        stamps = torch.arange(self.stamp, self.stamp + count)
        self.stamp += count
        for layer in key.layers.layers:
            cache.write(layer, position, cache.stored(layer, *tokens(stamps)))
        cache.length = position + count
        self.contents[key] = torch.cat([self.contents.get(key, torch.empty(0))[:position], stamps])

    def check(self) -> None:
        self.table.check_integrity()
        self.caches.check_integrity()
        ledger = self.table.ledger("m")
        for key, stamps in self.contents.items():
            assert self.caches.cached_length(key) == len(stamps)
            assert len(stamps) == (self.table.kept_length(key) or self.table.length(key))
            self._check_bits(key, stamps)
        used = sum(len(self.contents[key]) for key in self.contents if key in self.table)
        assert used <= ledger.capacity_tokens * len(LAYERS)
        assert ledger.kept_tokens <= ledger.capacity_tokens

    def _check_bits(self, key: SessionKey, stamps: torch.Tensor) -> None:
        """Bit for bit what was written, wherever it has been copied or moved to."""
        cache = self.caches.begin(key, len(stamps))
        last = cache.stored(LAYERS.start, *tokens(stamps[-1:]))
        held = cache.write(LAYERS.start, len(stamps) - 1, last)
        for seen, wished in zip(held.tensors, self.format.stored(*tokens(stamps)).tensors, strict=True):
            assert torch.equal(seen, wished)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["run", "run", "run", "end", "end", "free", "open", "begin", "begin"]),
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(1, 300),
        st.booleans(),
    ),
    max_size=25,
)


@settings(deadline=None)
@pytest.mark.parametrize("kind", list(FORMATS))
@given(actions=ACTIONS)
def test_both_accounts_agree_and_caches_hold_what_was_written(
    kind: str, actions: list[tuple[str, int, int, int, bool]]
) -> None:
    """Sessions run, end and begin with what others have, in room for a few. Only sessions are ever refused room."""
    node = Node(8, kind)
    keys = [SessionKey(str(index), "m", LAYERS) for index in range(5)]
    for action, index, source, count, flag in actions:
        key, table = keys[index], node.table
        free, held, wanted = table.ledger("m").free_tokens, table.ledger("m").held_blocks(key), count
        try:
            if action == "run" or (action == "begin" and (index == source or key in table)):
                wanted += table.length(key)
                (position,) = table.accept([Piece(key, None, count)], first_chunk=True, now=0) or (0,)
                node.hand_over()
                node.write(key, position, count)
            elif action == "begin":
                length = table.kept_length(keys[source]) or table.length(keys[source])
                prefix = Prefix(keys[source].session, max(128, min(length, count) // 128 * 128), flag)
                wanted += prefix.num_tokens
                table.accept([Piece(key, prefix.num_tokens, count)], first_chunk=True, now=0, prefix=prefix)
                node.hand_over()
                node.write(key, prefix.num_tokens, count)
            elif action == "open":
                if key not in table:
                    table.open(key, count, now=0)
                    table.accept([Piece(key, 0, min(count, 128))], first_chunk=True, now=0)
                    node.hand_over()
                    node.write(key, 0, min(count, 128))
            elif action == "end":
                table.keep(key, count, now=0)
            else:
                table.close([key])
        except KvFull:
            assert blocks_for(wanted) - held > free // 128, "there was room"
        except PositionMismatch:
            assert action == "begin"
        node.hand_over()
        node.check()
    node.table.close(keys)
    node.hand_over()
    assert node.table.ledger("m").free_tokens == 8 * 128
    assert node.caches.num_blocks == 0
