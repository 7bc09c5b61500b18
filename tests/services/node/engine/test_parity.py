"""Sharded output against the unsharded model in transformers, for each architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshnet.model import BLOCK_TOKENS, KvPrecision, LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import ShardSpec
from services.node.engine import attention
from services.node.engine.config import make_config
from services.node.engine.held_model import HeldModel
from services.node.engine.kv_cache import KvCache
from services.node.engine.kv_pool import LayerPool, allocate_pools
from services.node.engine.loading import load_shard
from services.node.engine.segments import CachedSegment
from services.node.engine.structure import find_structure
from services.node.engine.weights import SafetensorsSource
from services.node.files.manifest import read_manifest
from services.node.files.model_config import read_config
from services.node.files.safetensors_header import read_directory
from services.node.files.support import ARCHITECTURES
from tests.parity import Reference
from tests.services.node.engine.models import TINY, mesh, prompt_of, save_model, splits_of, steady

LOGITS_TOLERANCE = 1e-4
BOUNDARY_TOLERANCE = 0.03


SPLITS = [(1,), (2,), (3,), (1, 2, 3)]
# Tokens of the three sessions that each step runs: chunks beside single tokens, sessions that wait.
STEPS = (
    ((0, 17), (0, 0), (0, 5)),
    ((17, 18), (0, 15), (5, 25)),
    ((18, 39), (15, 16), (25, 26)),
    ((39, 40), (16, 23), (26, 31)),
)
PROMPTS = [prompt_of(40, 1), prompt_of(23, 2), prompt_of(31, 3)]
# Each session fits in a block.
KV_TOKENS = len(PROMPTS) * BLOCK_TOKENS


@pytest.fixture(scope="module", params=list(TINY))
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save_model(tmp_path_factory.mktemp(request.param), TINY[request.param])


@pytest.fixture(scope="module", params=list(TINY))
def steady_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save_model(tmp_path_factory.mktemp(request.param), steady(TINY[request.param]))


@pytest.fixture(scope="module")
def reference(steady_files: ModelFiles) -> Reference:
    return Reference(steady_files.path)


@pytest.fixture(scope="module")
def wanted(files: ModelFiles) -> list[torch.Tensor]:
    return unsharded_logits(files)


@torch.inference_mode()
def unsharded_logits(files: ModelFiles, **changes: object) -> list[torch.Tensor]:
    """Of the three sessions, in float32, with a changed config."""
    model: Any = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32, **changes).eval()
    return [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in PROMPTS]


@dataclass(frozen=True, slots=True)
class Float32Shard:
    layers: LayerRange
    model: HeldModel
    pools: Mapping[int, LayerPool]
    caches: list[KvCache]


@torch.inference_mode()
def float32_shards(
    files: ModelFiles, ends: tuple[int, ...] = (), kv: KvPrecision = KvPrecision.BFLOAT16
) -> list[Float32Shard]:
    manifest, shards = read_manifest(files), []
    for layers in splits_of(4, *ends):
        structure = find_structure(make_config(read_config(files)))
        spec = ShardSpec(manifest, layers, Quantization.FLOAT32, KV_TOKENS)
        pools = allocate_pools(manifest, layers, Quantization.FLOAT32, KV_TOKENS, torch.device("cpu"), kv)
        source = SafetensorsSource(files.path, read_directory(files.path), structure.base)
        shard = load_shard(spec, structure, source, torch.device("cpu"), lambda count: None)
        model = HeldModel(shard)
        model.attach(shard)
        shards.append(Float32Shard(layers, model, pools, [reserved(layers, pools, len(ids)) for ids in PROMPTS]))
    return shards


def reserved(layers: LayerRange, pools: Mapping[int, LayerPool], num_tokens: int) -> KvCache:
    cache = KvCache(layers, pools)
    cache.reserve(num_tokens)
    return cache


@torch.inference_mode()
def logits(shards: list[Float32Shard], chunks: list[list[int]], boundary: torch.dtype) -> list[torch.Tensor]:
    """One packed step over a chunk of each session, behind what the caches hold. What passes from shard to shard is
    rounded to `boundary`."""
    counts = [len(ids) for ids in chunks]
    lengths = [cache.length for cache in shards[0].caches]
    positions = torch.cat([torch.arange(at, at + count) for at, count in zip(lengths, counts, strict=True)])[None]
    hidden = shards[0].model.entry().embed(torch.tensor([[token for ids in chunks for token in ids]]), positions)
    for shard in shards:
        ends = list(accumulate(counts))
        segments = [
            CachedSegment(end - count, end, cache.length, cache)
            for end, count, cache in zip(ends, counts, shard.caches, strict=True)
            if count
        ]
        hidden = shard.model.forward(shard.layers, hidden.to(boundary).float(), positions, segments)
        for segment in segments:
            segment.cache.length = segment.position + segment.end - segment.start
    return list(torch.split(shards[0].model.entry().logits(hidden[0].to(boundary)), counts))


def sharded_logits(shards: list[Float32Shard], boundary: torch.dtype = torch.float32) -> list[torch.Tensor]:
    steps = [
        logits(shards, [ids[slice(*part)] for ids, part in zip(PROMPTS, step, strict=True)], boundary) for step in STEPS
    ]
    return [torch.cat(parts) for parts in zip(*steps, strict=True)]


def deviation(seen: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(seen, wanted, strict=True))


@pytest.mark.parametrize("ends", SPLITS)
def test_float32_logits_of_mixed_chunks_equal_the_unsharded_model(
    files: ModelFiles, wanted: list[torch.Tensor], ends: tuple[int, ...]
) -> None:
    shards = float32_shards(files, ends)
    assert deviation(sharded_logits(shards), wanted) < LOGITS_TOLERANCE
    manifest = read_manifest(files)
    for shard in shards:
        assert [cache.length for cache in shard.caches] == [len(ids) for ids in PROMPTS]
        for cache in shard.caches:
            cache.check_integrity()
        allocated = sum(pool.allocated_bytes for pool in shard.pools.values())
        assert allocated == len(shard.layers) * manifest.kv_bytes(KV_TOKENS, Quantization.FLOAT32)


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma2", "gpt_oss"])
def test_long_chunks_are_attended_for_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of 7 rows here, so that there are several a chunk, and blocks of one row."""
    monkeypatch.setattr(attention, "attended_rows", lambda device: 7)
    files = save_model(tmp_path, TINY[kind])
    assert deviation(sharded_logits(float32_shards(files)), unsharded_logits(files)) < LOGITS_TOLERANCE


def test_what_is_supported_is_compared_here() -> None:
    assert {options["model_type"] for options in TINY.values()} == set(ARCHITECTURES)


def test_bfloat16_boundaries_round_and_no_more(steady_files: ModelFiles) -> None:
    """The largest deviation of the logits, against their size, with float32 in between."""
    wanted = unsharded_logits(steady_files)
    seen = sharded_logits(float32_shards(steady_files, (1, 2, 3)), torch.bfloat16)
    assert deviation(seen, wanted) < BOUNDARY_TOLERANCE * max(float(row.abs().max()) for row in wanted)


@pytest.mark.parametrize("ends", SPLITS)
def test_greedy_tokens_at_any_split_are_those_of_the_unsharded_model(
    steady_files: ModelFiles, reference: Reference, ends: tuple[int, ...]
) -> None:
    """In bfloat16: chunks of two sessions, then all of the third beside the decodes of the others."""
    prompts = dict(zip("abc", PROMPTS, strict=True))
    with mesh(steady_files, splits_of(4, *ends)) as shards:
        last: dict[str, memoryview] = {}
        for start in range(0, 40, 20):
            chunks = {session: prompts[session][start : start + 20] for session in "ab" if prompts[session][start:]}
            last |= shards.step(chunks)
        emitted: dict[str, list[int]] = {session: [] for session in prompts}
        for index in range(6):
            tokens = shards.sample(last)
            for session, token in tokens.items():
                emitted[session].append(token)
            chunks = {session: [token] for session, token in tokens.items()}
            last = shards.step(chunks | ({"c": prompts["c"]} if index == 0 else {}))
    for session, prompt in prompts.items():
        reference.check(prompt, emitted[session])


def test_splits_do_not_change_a_bit(files: ModelFiles) -> None:
    """The residual stream is bfloat16 inside of a shard as it is between shards."""
    chunk = {"a": prompt_of(21)}
    hidden = []
    for ends in ((), (2,), (1, 3)):
        with mesh(files, splits_of(4, *ends)) as shards:
            hidden.append(bytes(shards.step(chunk)["a"]))
    assert hidden[0] == hidden[1] == hidden[2]


def test_float32_weights_serve_bfloat16_boundaries(steady_files: ModelFiles, reference: Reference) -> None:
    prompt = prompt_of(21)
    with mesh(steady_files, splits_of(4, 2), Quantization.FLOAT32) as shards:
        emitted = shards.generate({"a": prompt}, 8)["a"]
    reference.check(prompt, emitted)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral-window", {"sliding_window": 512}),
        ("qwen2-window", {"sliding_window": 512}),
        ("mixtral-window", {"sliding_window": 512}),
        ("phi3", {"sliding_window": 512}),
        ("gemma2", {"sliding_window": 512}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3", {"sliding_window": 512}),
        ("gemma3", {"layer_types": ["full_attention"] * 4, "sliding_window": 512}),
        ("gpt_oss", {"sliding_window": 512}),
    ],
)
def test_what_is_compared_matters(tmp_path: Path, kind: str, changes: dict[str, object]) -> None:
    """The unsharded model without it is another, so that parity would notice if it were left out."""
    files = save_model(tmp_path, TINY[kind])
    assert deviation(unsharded_logits(files, **changes), unsharded_logits(files)) > 100 * LOGITS_TOLERANCE


def test_sinks_matter(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["gpt_oss"])
    model: Any = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32)
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        with_sinks = model(ids).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e9)
        assert float((model(ids).logits - with_sinks).abs().max()) > 100 * LOGITS_TOLERANCE


def test_several_files_and_names_without_the_base_models_prefix(tmp_path: Path) -> None:
    """As the oldest checkpoints of GPT-2 are stored, in several files as large models are."""
    whole = save_model(tmp_path / "whole", TINY["gpt2"])
    model: Any = AutoModelForCausalLM.from_pretrained(whole.path, dtype=torch.bfloat16)
    model.transformer.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    files = ModelFiles("tiny", tmp_path / "base")
    assert (files.path / "model.safetensors.index.json").is_file()
    with mesh(whole) as one, mesh(files, splits_of(4, 2)) as other:
        assert bytes(one.step({"a": prompt_of(9)})["a"]) == bytes(other.step({"a": prompt_of(9)})["a"])
