"""What a frame means by the model and layers that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshnet.errors import InvalidRequest, UnknownModel, WrongLayers
from meshnet.model import LayerRange, Quantization
from meshnet.topology import ShardState
from services.node.core.shards import ShardTable
from services.node.core.work import ShardSpec
from tests.models import manifest


def spec(start: int, end: int, model_id: str = "m") -> ShardSpec:
    return ShardSpec(manifest(model_id, num_layers=12), LayerRange(start, end), Quantization.BFLOAT16, 1024)


def test_nothing_named_means_the_only_shard() -> None:
    shards = ShardTable()
    shards.add(spec(4, 8))
    assert shards.resolve(None, None) == ("m", LayerRange(4, 8))
    assert shards.resolve("m", LayerRange(5, 7)) == ("m", LayerRange(5, 7))


def test_neighbouring_shards_run_as_one() -> None:
    shards = ShardTable()
    shards.add(spec(0, 4))
    shards.add(spec(4, 6))
    assert shards.resolve(None, None) == ("m", LayerRange(0, 6))
    assert [shard.layers for shard in shards.listing()] == [LayerRange(0, 6)]


def test_the_tracker_is_told_the_revision_of_what_is_held() -> None:
    shards = ShardTable()
    shards.add(spec(0, 4))
    other = replace(spec(4, 6), manifest=replace(manifest("m", num_layers=12), revision="other"))
    shards.set_loading(other, 1, 2)
    assert [(shard.layers, shard.revision) for shard in shards.listing()] == [
        (LayerRange(0, 4), spec(0, 4).manifest.revision),
        (LayerRange(4, 6), "other"),
    ]
    shards.add(other)
    shards.loading_ended(other)
    assert [(shard.layers, shard.state) for shard in shards.listing()] == [
        (LayerRange(4, 6), ShardState.READY),
        (LayerRange(0, 4), ShardState.READY),
    ]


def test_what_is_not_held_or_ambiguous_is_refused() -> None:
    shards = ShardTable()
    with pytest.raises(UnknownModel):
        shards.resolve(None, None)
    shards.add(spec(0, 4))
    shards.add(spec(8, 12))
    with pytest.raises(UnknownModel, match="'x'"):
        shards.resolve("x", None)
    with pytest.raises(WrongLayers, match="0-4, 8-12"):
        shards.resolve("m", LayerRange(3, 9))
    with pytest.raises(InvalidRequest, match="name the ones"):
        shards.resolve("m", None)
    shards.add(spec(0, 2, "n"))
    with pytest.raises(InvalidRequest, match="several models"):
        shards.resolve(None, None)


def test_a_shard_can_be_dropped_in_part() -> None:
    shards = ShardTable()
    shards.add(spec(0, 10))
    shards.remove("m", LayerRange(3, 10))
    assert shards.layers("m") == frozenset(range(3))
    shards.remove("m", LayerRange(0, 3))
    assert shards.models() == ()


def test_the_quantization_of_layers_is_known_where_they_have_one() -> None:
    shards = ShardTable()
    shards.add(spec(0, 4))
    shards.add(replace(spec(4, 8), quantization=Quantization.INT8))
    assert shards.quantization("m", LayerRange(1, 4)) is Quantization.BFLOAT16
    assert shards.quantization("m", LayerRange(4, 8)) is Quantization.INT8
    assert shards.quantization("m", LayerRange(3, 5)) is None
    assert shards.quantization("m", LayerRange(6, 9)) is None
    assert shards.quantization("other", LayerRange(0, 1)) is None


def test_the_workspace_is_that_of_the_largest_step_of_what_is_held() -> None:
    shards = ShardTable()
    shards.add(spec(0, 4))
    assert shards.workspace_bytes() is None
    shards.add(spec(4, 6), 100)
    shards.add(spec(6, 8), 80)
    shards.add(spec(0, 2, "n"), 300)
    assert shards.workspace_bytes() == 300
    shards.remove("n", LayerRange(0, 2))
    assert shards.workspace_bytes() == 100


def test_loading_shards_are_listed_with_their_progress() -> None:
    shards = ShardTable()
    shards.set_loading(spec(0, 2), 50, 200)
    (listed,) = shards.listing()
    assert (listed.state, listed.bytes_done, listed.bytes_total) == (ShardState.LOADING, 50, 200)
    shards.loading_ended(spec(0, 2))
    assert shards.listing() == ()
