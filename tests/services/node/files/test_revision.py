"""Revisions: of the same weights one, of other weights another, and what is cut short is found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from meshnet.errors import BadFiles
from meshnet.model_files import ModelFiles
from services.node.files.gguf_header import gguf_tensors, open_gguf
from services.node.files.manifest import read_manifest
from services.node.files.safetensors_header import read_directory
from services.node.files.weight_samples import BLOCK_BYTES, NUM_BLOCKS, WHOLE_BYTES, blocks, sample_digests
from tests.e2e.tiny import save_tiny_llama

FILE = "model.safetensors"
NORM = "model.layers.3.input_layernorm.weight"
BIG = "model.embed_tokens.weight"
BIG_ROWS, ROW_BYTES = 1024, 128
MIDDLE = (BIG_ROWS * ROW_BYTES - BLOCK_BYTES) // 2 // ROW_BYTES


def revision(path: Path) -> str:
    return read_manifest(ModelFiles("tiny", path)).revision


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny model whose embedding is larger than what is read whole."""
    folder = save_tiny_llama(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": BIG_ROWS}))
    tensors = load_file(folder / FILE)
    tensors[BIG] = torch.cat([tensors[BIG], tensors[BIG] + 1])
    assert tensors[BIG].nbytes == BIG_ROWS * ROW_BYTES > WHOLE_BYTES
    save_file(tensors, folder / FILE)
    return folder


def change(folder: Path, name: str, row: int) -> None:
    tensors = load_file(folder / FILE)
    tensors[name][row] += 1
    save_file(tensors, folder / FILE)


def test_models_of_other_seeds_differ_in_nothing_but_the_revision(tmp_path: Path) -> None:
    one, other = (
        read_manifest(ModelFiles("tiny", save_tiny_llama(tmp_path / f"{seed}", seed=seed))) for seed in (0, 1)
    )
    assert one.revision != other.revision
    assert replace(one, revision=other.revision) == other


def test_the_same_weights_in_several_files_are_the_same_revision(model: Path) -> None:
    before = revision(model)
    tensors = load_file(model / FILE)
    (model / FILE).unlink()
    names = sorted(tensors, reverse=True)
    weight_map: dict[str, str] = {}
    for index in range(3):
        file = f"part-{index}.safetensors"
        save_file({name: tensors[name] for name in names[index::3]}, model / file, {"written": "otherwise"})
        weight_map |= dict.fromkeys(names[index::3], file)
    (model / f"{FILE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert revision(model) == before


@pytest.mark.parametrize(
    ("name", "row"), [(NORM, 0), (NORM, 40), (BIG, 0), (BIG, MIDDLE), (BIG, BIG_ROWS - 1)], ids=str
)
def test_one_changed_value_or_sampled_row_is_another_revision(model: Path, name: str, row: int) -> None:
    before = revision(model)
    change(model, name, row)
    assert revision(model) != before


def test_what_lies_between_the_blocks_is_not_seen(model: Path) -> None:
    """Known, and said in ADR 7."""
    before = revision(model)
    change(model, BIG, MIDDLE // 2)
    assert revision(model) == before


def test_exchanged_tensors_are_another_revision(model: Path) -> None:
    """Digests go with names."""
    before = revision(model)
    tensors = load_file(model / FILE)
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, model / FILE)
    assert revision(model) != before


def test_another_config_is_another_revision(model: Path) -> None:
    before = revision(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert revision(model) != before


def test_files_that_are_cut_short_are_named(model: Path) -> None:
    os.truncate(model / FILE, (model / FILE).stat().st_size - 1)
    with pytest.raises(BadFiles, match=r"model\.safetensors: .* cut short"):
        revision(model)


def test_files_that_are_cut_short_or_vanish_between_header_and_samples_are_named(model: Path) -> None:
    tensors = read_directory(model)
    os.truncate(model / FILE, (model / FILE).stat().st_size - 1)
    with pytest.raises(BadFiles, match=r"model\.safetensors ends within tensor"):
        sample_digests(model, tensors)
    (model / FILE).unlink()
    with pytest.raises(BadFiles, match=r"model\.safetensors cannot be read"):
        sample_digests(model, tensors)


def test_a_file_that_the_index_names_and_that_is_not_here_is_named(model: Path) -> None:
    (model / f"{FILE}.index.json").write_text(json.dumps({"weight_map": {BIG: "gone.safetensors"}}))
    with pytest.raises(BadFiles, match=r"gone\.safetensors cannot be read"):
        revision(model)


@pytest.fixture
def gguf(tmp_path: Path, smollm2_gguf: Path) -> Iterator[Path]:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(smollm2_gguf.read_bytes())
    yield copy
    copy.unlink()


def test_a_gguf_files_revision_is_of_its_weights(gguf: Path, smollm2_gguf: Path) -> None:
    before = revision(smollm2_gguf)
    assert revision(gguf) == before
    tensors = gguf_tensors(open_gguf(ModelFiles("m", gguf)))
    for name, offset in [("blk.7.ffn_norm.weight", 100), ("blk.7.ffn_up.weight", 0), ("token_embd.weight", -1)]:
        tensor = tensors[name]
        with gguf.open("r+b") as file:
            file.seek(tensor.begin + offset % tensor.num_bytes)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        changed = revision(gguf)
        assert changed != before
        before = changed


def test_a_gguf_file_that_is_cut_short_is_named(gguf: Path) -> None:
    os.truncate(gguf, gguf.stat().st_size - 4096)
    with pytest.raises(BadFiles, match=r"copy\.gguf of model 'tiny' is broken or cut short"):
        revision(gguf)


@given(st.integers(0, 1 << 40))
def test_blocks_lie_inside_and_touch_both_ends(num_bytes: int) -> None:
    read = list(blocks(num_bytes))
    assert all(offset >= 0 and length > 0 for offset, length in read)
    assert all(offset + length <= after for (offset, length), (after, _) in pairwise(read))
    assert sum(length for _, length in read) == (num_bytes if num_bytes <= WHOLE_BYTES else NUM_BLOCKS * BLOCK_BYTES)
    if num_bytes:
        assert read[0][0] == 0
        assert sum(read[-1]) == num_bytes
