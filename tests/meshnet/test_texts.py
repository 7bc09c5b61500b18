"""What people type: sizes, addresses, models."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.addresses import is_loopback, join_address, split_address
from meshnet.errors import InvalidRequest
from meshnet.model import LayerRange, merge_layers
from meshnet.model_files import HubModel, local_models, locate_models
from meshnet.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("8GiB", 8 << 30), ("1.5g", 1_500_000_000), (" 230 MB ", 230_000_000), ("4kib", 4096)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "1 GB 2", "8 gigabytes", "1e9", "GB", "NaN"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a size"):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [format_size(size) for size in (0, 999, 70_800_000, 2 * 10**12)] == ["0 B", "999 B", "70.8 MB", "2.0 TB"]


@pytest.mark.parametrize(
    ("text", "parts"), [("h:1", ("h", 1)), ("[::1]:80", ("::1", 80)), ("0.0.0.0:0", ("0.0.0.0", 0)), (":5", ("", 5))]
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts
    if parts[0]:
        assert join_address(*parts) == text


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:70000", "host:-1", "[::1]", "host:१"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        split_address(text)


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "10.0.0.1")] == [
        *([True] * 3),
        *([False] * 2),
    ]


@given(st.frozensets(st.integers(0, 40)))
def test_merged_layers_are_the_same_layers_in_the_fewest_ranges(layers: frozenset[int]) -> None:
    ranges = merge_layers(layers)
    assert {layer for r in ranges for layer in r.layers} == layers
    assert all(a.end < b.start for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 2), (-1, 2)])
def test_a_layer_range_is_never_empty_or_negative(start: int, end: int) -> None:
    with pytest.raises(InvalidRequest):
        LayerRange(start, end)


def test_models_have_the_id_that_is_given_or_their_files_name(tmp_path: Path) -> None:
    directory, gguf = tmp_path / "Big Llama", tmp_path / "Small.Q4.gguf"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    gguf.touch()
    (tmp_path / "notes.txt").touch()
    assert set(locate_models([f"mine={directory}", str(gguf)])) == {"mine", "small.q4"}
    assert set(locate_models([], tmp_path)) == {"big-llama", "small.q4"}
    assert local_models(locate_models([str(gguf)], tmp_path))["small.q4"].is_gguf


def test_models_of_a_hub_are_named_by_repository_and_revision() -> None:
    found = locate_models(["hf:Org/Some-Model", "mine=hf:Org/Other@refs/pr/1", "hf:gpt2@607a30d"])
    assert found == {
        "some-model": HubModel("some-model", "Org/Some-Model", "main"),
        "mine": HubModel("mine", "Org/Other", "refs/pr/1"),
        "gpt2": HubModel("gpt2", "gpt2", "607a30d"),
    }
    assert local_models(found) == {}
    for wrong in ("hf:", "hf:a/b/c", "hf:../x", "hf:a/b@", "hf:a b"):
        with pytest.raises(InvalidRequest, match="no model of the hub"):
            locate_models([wrong])


@pytest.mark.parametrize(
    ("argument", "said"),
    [("{}/none", "does not exist"), ("{}/notes.txt", "neither"), ("../x={}/m.gguf", "not a model id")],
)
def test_what_is_no_model_is_said(tmp_path: Path, argument: str, said: str) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "m.gguf").touch()
    with pytest.raises(InvalidRequest, match=said):
        locate_models([argument.format(tmp_path)])


def test_one_id_cannot_name_two_models(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(InvalidRequest, match="name one of them"):
        locate_models([f"m={tmp_path}/a.gguf", f"m={tmp_path}/b.gguf"])
