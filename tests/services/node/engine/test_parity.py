"""Sharded output against the unsharded model in transformers, for each architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from meshnet.model import LayerRange, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import ShardSpec
from services.node.engine.attention import CachedSegment
from services.node.engine.config import make_config
from services.node.engine.held_model import HeldModel
from services.node.engine.kv_cache import KvCache
from services.node.engine.kv_pool import allocate_pools
from services.node.engine.loading import load_shard
from services.node.engine.structure import find_structure
from services.node.engine.weights import SafetensorsSource
from services.node.files.manifest import read_manifest
from services.node.files.model_config import read_config
from tests.parity import Reference
from tests.services.node.engine.models import TINY, mesh, prompt_of, save_model, splits_of

LOGITS_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(TINY))
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return save_model(tmp_path_factory.mktemp(request.param), TINY[request.param])


def float32_model(files: ModelFiles) -> HeldModel:
    manifest = read_manifest(files)
    structure = find_structure(make_config(read_config(files)))
    spec = ShardSpec(manifest, manifest.all_layers, Quantization.FLOAT32, 512)
    with torch.inference_mode():
        source = SafetensorsSource(files, structure.base)
        shard = load_shard(spec, structure, source, torch.device("cpu"), lambda count: None)
    model = HeldModel(shard)
    model.attach(shard)
    return model


@torch.inference_mode()
def logits(model: HeldModel, chunks: list[tuple[KvCache, list[int]]]) -> list[torch.Tensor]:
    """One packed step over each chunk, behind what its cache holds."""
    segments, row = [], 0
    for cache, ids in chunks:
        segments.append(CachedSegment(row, row + len(ids), cache.length, cache))
        row += len(ids)
    positions = torch.cat([torch.arange(s.position, s.position + s.end - s.start) for s in segments])[None]
    token_ids = torch.tensor([[token for _, ids in chunks for token in ids]])
    hidden = model.entry().embed(token_ids, positions)
    hidden = model.forward(LayerRange(0, 4), hidden, positions, segments)
    for segment in segments:
        segment.cache.length = segment.position + segment.end - segment.start
    return list(torch.split(model.entry().logits(hidden[0]), [len(ids) for _, ids in chunks]))


def test_float32_logits_of_mixed_chunks_equal_the_unsharded_model(files: ModelFiles) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
    first, second = prompt_of(40, 1), prompt_of(23, 2)
    with torch.inference_mode():
        wanted = [reference(torch.tensor([ids])).logits[0] for ids in (first, second)]
    model = float32_model(files)
    manifest = read_manifest(files)
    pools = allocate_pools(manifest, manifest.all_layers, Quantization.FLOAT32, 256, torch.device("cpu"))
    a, b = KvCache(manifest.all_layers, pools), KvCache(manifest.all_layers, pools)
    a.reserve(len(first))
    b.reserve(len(second))
    seen_a = [logits(model, [(a, first[:17])])[0]]
    seen_b = []
    for part_a, part_b in (((17, 18), (0, 15)), ((18, 39), (15, 16)), ((39, 40), (16, 23))):
        in_a, in_b = logits(model, [(a, first[slice(*part_a)]), (b, second[slice(*part_b)])])
        seen_a.append(in_a)
        seen_b.append(in_b)
    torch.testing.assert_close(torch.cat(seen_a), wanted[0], atol=LOGITS_TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.cat(seen_b), wanted[1], atol=LOGITS_TOLERANCE, rtol=0)
    a.check_integrity()
    b.check_integrity()


@pytest.mark.parametrize("ends", [(), (1,), (3,), (1, 2)])
def test_greedy_tokens_at_any_split_are_those_of_the_unsharded_model(files: ModelFiles, ends: tuple[int, ...]) -> None:
    prompt = prompt_of(21)
    with mesh(files, splits_of(4, *ends)) as shards:
        emitted = shards.generate({"a": prompt}, 12, chunk=8)["a"]
    Reference(files.path).check(prompt, emitted)


def test_splits_do_not_change_a_bit(files: ModelFiles) -> None:
    """The residual stream is bfloat16 inside of a shard as it is between shards."""
    chunk = {"a": prompt_of(21)}
    hidden = []
    for ends in ((), (2,), (1, 3)):
        with mesh(files, splits_of(4, *ends)) as shards:
            hidden.append(bytes(shards.step(chunk)["a"]))
    assert hidden[0] == hidden[1] == hidden[2]


def test_float32_weights_serve_bfloat16_boundaries(files: ModelFiles) -> None:
    prompt = prompt_of(21)
    with mesh(files, splits_of(4, 2), Quantization.FLOAT32) as shards:
        emitted = shards.generate({"a": prompt}, 8)["a"]
    Reference(files.path).check(prompt, emitted)


def test_several_files_and_names_without_the_base_models_prefix(tmp_path: Path) -> None:
    """As the oldest checkpoints of GPT-2 are stored, in several files as large models are."""
    whole = save_model(tmp_path / "whole", TINY["gpt2"])
    model: Any = AutoModelForCausalLM.from_pretrained(whole.path, dtype=torch.bfloat16)
    model.transformer.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    files = ModelFiles("tiny", tmp_path / "base")
    assert (files.path / "model.safetensors.index.json").is_file()
    with mesh(whole) as one, mesh(files, splits_of(4, 2)) as other:
        assert bytes(one.step({"a": prompt_of(9)})["a"]) == bytes(other.step({"a": prompt_of(9)})["a"])
