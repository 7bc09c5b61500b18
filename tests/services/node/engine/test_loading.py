"""What a load reads, holds and refuses."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from meshnet.errors import LoadFailed
from meshnet.model import LayerRange, ModelManifest, Quantization
from meshnet.model_files import ModelFiles
from services.node.core.work import LoadedShard, ShardSpec
from services.node.engine import weights
from services.node.engine.config import make_config
from services.node.engine.executor import TorchExecutor
from services.node.engine.loading import load_shard
from services.node.engine.structure import find_structure
from services.node.engine.weights import SafetensorsSource
from services.node.files.manifest import read_manifest
from services.node.files.model_config import read_config
from services.node.files.safetensors_header import SINGLE_FILE, read_directory
from tests.services.node.engine.models import MODEL, TINY, mesh, prompt_of, save_model

ALL = LayerRange(0, 4)


class RecordingSource:
    """A source that remembers what was read."""

    def __init__(self, source: SafetensorsSource) -> None:
        self._source = source
        self.read_names: list[str] = []

    def holds(self, name: str) -> bool:
        return self._source.holds(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        self.read_names.append(name)
        return self._source.read(name, dtype)

    def read_expert(self, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
        self.read_names.append(f"{name}.{expert}")
        return self._source.read_expert(name, expert, dtype)

    def leftovers(self, names: Collection[str]) -> frozenset[str]:
        return self._source.leftovers(names)


def load(files: ModelFiles, manifest: ModelManifest, layers: LayerRange = ALL) -> LoadedShard:
    spec = ShardSpec(manifest, layers, Quantization.BFLOAT16, 512)
    return TorchExecutor({MODEL: files}).load(spec, lambda done, total: None)


def names_read(files: ModelFiles, layers: LayerRange) -> list[str]:
    structure = find_structure(make_config(read_config(files)))
    spec = ShardSpec(read_manifest(files), layers, Quantization.BFLOAT16, 512)
    source = RecordingSource(SafetensorsSource(files.path, read_directory(files.path), structure.base))
    load_shard(spec, structure, source, torch.device("cpu"), lambda count: None)
    return source.read_names


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_middle_shard_reads_its_own_tensors_once_and_no_others(tmp_path: Path, kind: str) -> None:
    files = save_model(tmp_path, TINY[kind])
    names = names_read(files, LayerRange(1, 3))
    assert len(names) == len(set(names))
    stored = load_file(tmp_path / "model.safetensors")
    assert set(names) == {name for name in stored if ".1." in name or ".2." in name}


def test_a_shard_at_layer_0_reads_embedding_norm_and_head_too(tmp_path: Path) -> None:
    names = names_read(save_model(tmp_path, TINY["llama"]), LayerRange(0, 1))
    outside = {name for name in names if ".layers." not in name}
    assert outside == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("kind", list(TINY))
@pytest.mark.parametrize(
    ("layers", "quantization"), [(ALL, Quantization.FLOAT32), (LayerRange(1, 3), Quantization.BFLOAT16)]
)
def test_the_manifest_knows_the_bytes_and_progress_ends_at_them(
    tmp_path: Path, kind: str, layers: LayerRange, quantization: Quantization
) -> None:
    files = save_model(tmp_path, TINY[kind])
    manifest = read_manifest(files)
    seen: list[tuple[int, int]] = []
    executor = TorchExecutor({MODEL: files})
    shard = executor.load(ShardSpec(manifest, layers, quantization, 512), lambda *bytes_: seen.append(bytes_))
    expected = manifest.weight_bytes(layers, quantization)
    # Gemma's embedding holds its scale beside.
    assert shard.weight_bytes - expected in ((0, 4) if kind.startswith("gemma") else (0,))
    assert seen[-1] == (expected, expected)
    assert seen == sorted(seen)


def test_detached_layers_leave_memory(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["llama"])
    executor = TorchExecutor({MODEL: files})
    shard: Any = executor.load(
        ShardSpec(read_manifest(files), ALL, Quantization.BFLOAT16, 512), lambda done, total: None
    )
    first, last = (weakref.ref(shard.layers[index].module) for index in (0, 3))
    executor.attach(shard)
    del shard
    executor.detach(MODEL, LayerRange(0, 2))
    assert first() is None
    assert last() is not None
    executor.detach(MODEL, LayerRange(2, 4))
    gc.collect()
    assert last() is None


def test_steps_beside_a_load_are_not_disturbed(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["llama3-rope"])
    manifest = read_manifest(files)
    chunk = {"a": prompt_of(20)}
    with mesh(files) as shards, ThreadPoolExecutor(1) as loader:
        wanted = bytes(shards.step(chunk, {"a": 0})["a"])
        loads = [loader.submit(load, files, manifest) for _ in range(4)]
        steps = 0
        while not all(future.done() for future in loads) or steps == 0:
            assert bytes(shards.step(chunk, {"a": 0})["a"]) == wanted
            steps += 1
        sizes = {future.result(timeout=60).weight_bytes for future in loads}
    assert sizes == {manifest.weight_bytes(ALL, Quantization.BFLOAT16)}


def test_a_model_without_files_here_is_refused(tmp_path: Path) -> None:
    manifest = read_manifest(save_model(tmp_path, TINY["llama"]))
    with pytest.raises(LoadFailed, match="no files"):
        TorchExecutor({}).load(ShardSpec(manifest, ALL, Quantization.BFLOAT16, 512), lambda done, total: None)


def test_weights_of_another_shape_than_the_config_says_are_refused(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["llama"])
    manifest = read_manifest(files)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(LoadFailed, match=r"mlp\..*shape"):
        load(files, manifest)


def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path: Path) -> None:
    """An unknown bias would be dropped, and the output silently wrong."""
    files = save_model(tmp_path, TINY["llama"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(tensors, file)
    with pytest.raises(LoadFailed, match=r"no place for 4 tensors.*q_proj\.bias"):
        load(files, read_manifest(files))


def test_stored_masks_and_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    files = save_model(tmp_path, TINY["gpt2"])
    expected = load(files, read_manifest(files)).weight_bytes
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 512, 512) for layer in range(4)}
    save_file(tensors, file)
    manifest = read_manifest(files)
    assert load(files, manifest).weight_bytes == expected == manifest.weight_bytes(ALL, Quantization.BFLOAT16)


def test_the_callers_config_is_left_as_it_was() -> None:
    config = make_config(TINY["llama"])
    before = config.to_dict()
    find_structure(config)
    assert config.to_dict() == before
    assert config._attn_implementation != "meshnet"


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("cohere2", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99}),
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": 99}),
        ("gptj", {"n_embd": 64, "n_layer": 2, "vocab_size": 99}),
    ],
)
def test_models_whose_output_is_not_compared_in_the_tests_are_refused(model_type: str, options: dict[str, Any]) -> None:
    with pytest.raises(LoadFailed, match="not supported"):
        make_config({"model_type": model_type, **options})


def test_parts_beside_the_known_ones_are_found() -> None:
    config = AutoConfig.for_model("bloom", hidden_size=64, n_layer=2, n_head=2, vocab_size=99)
    with pytest.raises(LoadFailed, match="BloomForCausalLM"):
        find_structure(config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_tensors_are_read_in_pieces(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_PIECE_VALUES", 1000)
    stored = {"a": torch.randn(77, 130).bfloat16(), "b": torch.randn(3, 50, 40), "c": torch.randn(5000)}
    save_file(stored, tmp_path / SINGLE_FILE)
    source = SafetensorsSource(tmp_path, read_directory(tmp_path), "model")
    for name, tensor in stored.items():
        assert source.read(name, dtype).equal(tensor.to(dtype)), name
