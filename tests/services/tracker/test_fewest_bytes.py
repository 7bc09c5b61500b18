"""A gap is filled with the fewest bytes, held against a search of everything that could be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshnet.directive import DirectiveKind
from meshnet.model import LayerRange, ModelManifest, Quantization, WeightBytes, merge_layers
from meshnet.topology import DeployedModel, Node, Shard, ShardState
from services.tracker.placement import WORKSPACE_BYTES, plan
from services.tracker.placement.costs import Costs, layer_bytes
from tests.services.tracker.meshes import obey

KINDS = (Quantization.BFLOAT16, Quantization.INT8, Quantization.NF4)


@dataclass(frozen=True)
class Case:
    """A mesh from which a node has just gone: `gap` is what only that node held."""

    nodes: tuple[Node, ...]
    model: DeployedModel
    gap: LayerRange


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_layers = draw(st.integers(3, 6))
    sizes = [draw(st.integers(1, 3)) for _ in range(num_layers)]
    layers = tuple(WeightBytes(4 * size, 2 * size, size, 8 * size) for size in sizes)
    model = DeployedModel(ModelManifest("m", "r", "llama", 1, 1, 64, layers, WeightBytes(0, 0, 0, 0), 0), 1)
    start = draw(st.integers(0, num_layers - 1))
    gap = LayerRange(start, draw(st.integers(start + 1, num_layers)))
    nodes = tuple(draw(_nodes(model, gap, f"n{index}")) for index in range(draw(st.integers(1, 4))))
    held = {layer for n in nodes for layer in n.layers("m")}
    assume(held and held == set(range(num_layers)) - set(gap.layers))
    return Case(nodes, model, gap)


@st.composite
def _nodes(draw: st.DrawFn, model: DeployedModel, gap: LayerRange, node_id: str) -> Node:
    quantization = draw(st.sampled_from(KINDS))
    around = sorted(set(range(model.manifest.num_layers)) - set(gap.layers))
    chosen = frozenset(layer for layer in around if draw(st.booleans()))
    taken = sum(layer_bytes(model, layer, quantization) for layer in chosen)
    shards = [Shard("m", run, quantization, ShardState.READY) for run in merge_layers(chosen)]
    room = taken + draw(st.integers(0, 16))
    return Node(
        node_id, "h:1", "h:2", WORKSPACE_BYTES + room, quantization, tuple(shards), available_models=frozenset("m")
    )


def free_room(case: Case) -> dict[str, int]:
    return {
        n.node_id: n.vram_bytes
        - WORKSPACE_BYTES
        - sum(layer_bytes(case.model, layer, n.quantization) for layer in n.layers("m"))
        for n in case.nodes
    }


def rooms_with_drops(case: Case) -> Iterator[dict[str, int]]:
    """The room of each node, for every way in which one holder of each layer keeps it and all others drop it."""
    holders: dict[int, list[Node]] = {}
    for n in case.nodes:
        for layer in n.layers("m"):
            holders.setdefault(layer, []).append(n)
    for keepers in product(*holders.values()):
        room = Counter(free_room(case))
        for (layer, held_by), keeper in zip(holders.items(), keepers, strict=True):
            for n in held_by:
                if n is not keeper:
                    room[n.node_id] += layer_bytes(case.model, layer, n.quantization)
        yield dict(room)


def fewest_bytes(case: Case, room: Mapping[str, int]) -> int | None:
    """Over all cuts of the gap into consecutive pieces, each on a node of its own; None if none fits."""
    costs = Costs(case.model)

    def search(start: int, left: Sequence[Node]) -> int | None:
        if start == case.gap.end:
            return 0
        best: int | None = None
        for taker in left:
            others = [n for n in left if n is not taker]
            for end in range(start + 1, case.gap.end + 1):
                piece = LayerRange(start, end)
                if costs.of(piece, taker.quantization) > room[taker.node_id]:
                    break
                rest = search(end, others)
                if rest is not None:
                    total = costs.moved(piece, taker.quantization) + rest
                    best = total if best is None else min(best, total)
        return best

    return search(case.gap.start, case.nodes)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_gap_is_filled_with_the_fewest_bytes(case: Case) -> None:
    """In free room if that can be, or in fewer pieces for no more bytes; else also in room that redundant replicas
    leave."""
    result = plan(case.nodes, [case.model])
    costs = Costs(case.model)
    fills = [d for d in result.drafts if d.kind is DirectiveKind.LOAD_SHARD and "have no node" in d.reason]
    moved = sum(costs.moved(d.layers, d.quantization) for d in fills)
    makes_room = any("makes room for" in d.reason for d in result.drafts)
    in_free_room = fewest_bytes(case, free_room(case))
    found = [b for room in rooms_with_drops(case) if (b := fewest_bytes(case, room)) is not None]
    if in_free_room is not None:
        assert moved <= in_free_room
        assert makes_room or moved == in_free_room
    elif found:
        assert moved == min(found)
    else:
        # Consecutive pieces do not fit. Layer by layer they may.
        assert result.shortfalls or not makes_room
    if not result.shortfalls:
        served = {layer for n in obey(case.nodes, result.drafts) for layer in n.layers("m")}
        assert served == set(range(case.model.manifest.num_layers))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_lighter_quantization_is_used_only_where_the_preferred_one_has_no_place(case: Case) -> None:
    nodes = [replace(n, fallbacks=(Quantization.INT8, Quantization.NF4)) for n in case.nodes]
    result, without = plan(nodes, [case.model]), plan(case.nodes, [case.model])
    by_id = {n.node_id: n for n in nodes}
    if not without.shortfalls:
        assert result == without
    for draft in result.drafts:
        if draft.kind is DirectiveKind.LOAD_SHARD:
            assert draft.quantization in by_id[draft.node_id].quantizations
    if result.shortfalls:
        assert without.shortfalls


def test_a_gap_is_covered_at_a_fallback_quantization() -> None:
    layers = (WeightBytes(4_000_000, 2_000_000, 1_000_000, 8_000_000),) * 10
    model = DeployedModel(ModelManifest("m", "r", "llama", 1, 1, 64, layers, WeightBytes(0, 0, 0, 0), 0), 1)
    room = 24_000_000 + WORKSPACE_BYTES
    one = Node("n1", "h:1", "h:2", room, Quantization.BFLOAT16, available_models=frozenset("m"))
    assert plan([one], [model]).shortfalls
    (draft,) = plan([replace(one, fallbacks=(Quantization.INT8,))], [model]).drafts
    assert (str(draft.layers), draft.quantization) == ("0-10", Quantization.INT8)
