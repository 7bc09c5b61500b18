"""What every plan must keep, on meshes drawn at random: fit, coverage first, whole models, stability, safe drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.directive import Directive, DirectiveKind
from meshnet.model import KvPrecision, ModelManifest, Quantization, WeightBytes, merge_layers
from meshnet.topology import DeployedModel, Node, Shard, ShardState
from services.tracker.placement import WORKSPACE_BYTES, Draft, Known, Plan, Policy, plan
from services.tracker.placement.accounts import Account, open_account
from services.tracker.placement.costs import Costs, layer_bytes
from tests.services.tracker.meshes import obey, settle

MODEL_IDS = ("a", "b")
KINDS = (Quantization.BFLOAT16, Quantization.INT8)


@st.composite
def weights(draw: st.DrawFn, most: int) -> WeightBytes:
    size = draw(st.integers(0, most))
    return WeightBytes(2 * size, size, size // 2, 4 * size)


@st.composite
def models(draw: st.DrawFn, model_id: str, uniform: bool) -> DeployedModel:
    num_layers = draw(st.integers(1, 20))
    layer = draw(weights(5))
    layers = (layer,) * num_layers if uniform else tuple(draw(weights(5)) for _ in range(num_layers))
    manifest = ModelManifest(model_id, "r", "llama", 8, 10, 64, layers, draw(weights(10)), 6, 1)
    kv_precision = draw(st.sampled_from(KvPrecision))
    return DeployedModel(manifest, draw(st.integers(0, 2)), draw(st.integers(0, 1)), kv_precision=kv_precision)


@st.composite
def empty_nodes(draw: st.DrawFn, stubs: bool = True) -> list[Node]:
    count = draw(st.integers(1, 5))
    fetches = [draw(st.integers(0, 2)) == 0 for _ in range(count)]
    return [
        Node(
            node_id=f"n{index}",
            forward_address="127.0.0.1:1",
            grpc_address="127.0.0.1:2",
            vram_bytes=WORKSPACE_BYTES + draw(st.integers(-5, 200)),
            quantization=draw(st.sampled_from(KINDS)),
            available_models=draw(st.frozensets(st.sampled_from(MODEL_IDS), min_size=0 if fetches[index] else 1)),
            stub=stubs and draw(st.integers(0, 4)) == 0,
            tracker_node=index == 0 and draw(st.booleans()),
            fetches=fetches[index],
        )
        for index in range(count)
    ]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[Node], list[DeployedModel]]:
    """Nodes that hold some layers, as many as fit, and one or two deployed models. Those without files may hold what
    they fetched when there was a source, also of another revision."""
    uniform = draw(st.booleans())
    deployed = [draw(models(model_id, uniform)) for model_id in MODEL_IDS[: draw(st.integers(1, 2))]]
    return [draw(_with_shards(node, deployed)) for node in draw(empty_nodes())], deployed


@st.composite
def _with_shards(draw: st.DrawFn, node: Node, deployed: Sequence[DeployedModel]) -> Node:
    shards: list[Shard] = []
    free = node.vram_bytes - WORKSPACE_BYTES
    for model in deployed:
        has_files = model.model_id in node.available_models
        if draw(st.booleans()) or not (has_files or (node.fetches and not node.stub)):
            continue
        revision = draw(st.sampled_from(("r", "") if has_files else ("r", "r", "old")))
        chosen = set()
        for layer in sorted(draw(st.frozensets(st.integers(0, model.manifest.num_layers - 1)))):
            size = layer_bytes(model, layer, node.quantization)
            if size <= free:
                free -= size
                chosen.add(layer)
        state = draw(st.sampled_from((ShardState.READY, ShardState.READY, ShardState.LOADING)))
        runs = merge_layers(chosen)
        shards += [Shard(model.model_id, run, node.quantization, state, revision=revision) for run in runs]
    return replace(node, shards=tuple(shards))


def open_accounts(nodes: Sequence[Node], deployed: Sequence[DeployedModel]) -> list[Account]:
    costs = {model.model_id: Costs(model) for model in deployed}
    return [open_account(Known(node), costs, Policy()) for node in nodes]


def takers_of(accounts: Sequence[Account], model_id: str) -> list[Account]:
    """Nodes that have the model's files, or fetch weights while a real node has them."""
    having = [account for account in accounts if model_id in account.node.available_models]
    if all(account.node.stub for account in having):
        return having
    fetching = [account for account in accounts if account.node.fetches and not account.node.stub]
    return having + [account for account in fetching if account not in having]


def pool_of(accounts: Sequence[Account], model_id: str) -> list[Account]:
    """Nodes that may hold the model, or do: the real ones; stub nodes only if there is no such."""
    takers = takers_of(accounts, model_id)
    able = takers + [account for account in accounts if account.layers(model_id) and account not in takers]
    return [account for account in able if not account.node.stub] or able


def held(nodes: Sequence[Node], model: DeployedModel) -> Counter[int]:
    accounts = open_accounts(nodes, [model])
    return Counter(i for account in pool_of(accounts, model.model_id) for i in account.layers(model.model_id))


def check_plan(nodes: Sequence[Node], deployed: Sequence[DeployedModel], result: Plan) -> None:
    check_fit(nodes, deployed, result.drafts)
    check_coverage_first(nodes, deployed, result)
    check_drops(nodes, deployed, result.drafts)
    check_revisions(nodes, result.drafts)
    for model in deployed:
        accounts = open_accounts(nodes, deployed)
        pool = {account.node_id for account in pool_of(accounts, model.model_id)}
        pool &= {account.node_id for account in takers_of(accounts, model.model_id)}
        loaded = {d.node_id for d in result.drafts if d.model_id == model.model_id and _is_load(d)}
        assert loaded <= pool, (
            "layers go to nodes that have the files or can fetch them, and never to stubs beside real nodes"
        )


def check_fit(nodes: Sequence[Node], deployed: Sequence[DeployedModel], drafts: Sequence[Draft]) -> None:
    accounts = {account.node_id: account for account in open_accounts(nodes, deployed)}
    by_id = {model.model_id: model for model in deployed}
    for draft in drafts:
        account = accounts[draft.node_id]
        if _is_load(draft):
            assert not set(draft.layers.layers) & set(account.layers(draft.model_id)), "no layer twice on a node"
            account.load(Costs(by_id[draft.model_id]), draft.layers, draft.quantization)
            assert account.free >= 0, f"{draft} does not fit"
        else:
            account.drop(draft.model_id, draft.layers.layers)


def check_coverage_first(nodes: Sequence[Node], deployed: Sequence[DeployedModel], result: Plan) -> None:
    counts = {model.model_id: held(nodes, model) for model in deployed}
    pools = {m.model_id: {a.node_id for a in pool_of(open_accounts(nodes, [m]), m.model_id)} for m in deployed}
    for draft in result.drafts:
        if not _is_load(draft) and draft.node_id in pools[draft.model_id] and "another revision" not in draft.reason:
            counts[draft.model_id].subtract(draft.layers.layers)
    whole = {model.model_id: not counts[model.model_id] for model in deployed}
    for draft in filter(_is_load, result.drafts):
        if any(counts[draft.model_id][layer] > 0 for layer in draft.layers.layers):
            assert not result.shortfalls
            assert all(counts[m.model_id][i] > 0 for m in deployed for i in m.manifest.all_layers.layers)
        counts[draft.model_id].update(draft.layers.layers)
    for model in deployed:
        missing = [i for i in model.manifest.all_layers.layers if counts[model.model_id][i] <= 0]
        assert bool(missing) == bool(result.shortfall(model.model_id))
        if whole[model.model_id] and missing:
            assert len(missing) == model.manifest.num_layers, "a model that nobody held is placed whole or not at all"


def check_drops(nodes: Sequence[Node], deployed: Sequence[DeployedModel], drafts: Sequence[Draft]) -> None:
    by_id = {node.node_id: node for node in nodes}
    ready = {
        m.model_id: Counter(
            (account.node.stub, i)
            for account in open_accounts(nodes, deployed)
            for i in account.ready.get(m.model_id, ())
        )
        for m in deployed
    }
    for draft in drafts:
        node = by_id[draft.node_id]
        if _is_load(draft) or "real nodes serve all" in draft.reason or "another revision" in draft.reason:
            continue
        for layer in draft.layers.layers:
            ready[draft.model_id][node.stub, layer] -= 1
            assert ready[draft.model_id][node.stub, layer] >= 1, f"{draft} drops the last replica of layer {layer}"


def check_revisions(nodes: Sequence[Node], drafts: Sequence[Draft]) -> None:
    foreign = {
        (n.node_id, s.model_id, i) for n in nodes for s in n.shards if s.revision == "old" for i in s.layers.layers
    }
    dropped = {(d.node_id, d.model_id, i) for d in drafts if not _is_load(d) for i in d.layers.layers}
    assert foreign <= dropped, "what is of another revision is dropped"


def _is_load(draft: Draft) -> bool:
    return draft.kind is DirectiveKind.LOAD_SHARD


@settings(max_examples=100, deadline=None)
@given(meshes())
def test_every_plan_keeps_the_rules(mesh: tuple[list[Node], list[DeployedModel]]) -> None:
    nodes, deployed = mesh
    check_plan(nodes, deployed, plan(nodes, deployed))


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_a_mesh_settles(mesh: tuple[list[Node], list[DeployedModel]]) -> None:
    nodes, deployed = mesh
    ready = [replace(n, shards=tuple(replace(s, state=ShardState.READY) for s in n.shards)) for n in nodes]
    settled = settle(ready, deployed)
    assert plan(settled, deployed).drafts == ()


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_open_directives_count_as_done(mesh: tuple[list[Node], list[DeployedModel]]) -> None:
    nodes, deployed = mesh
    drafts = plan(nodes, deployed).drafts
    open_ones = [
        Directive(str(i), d.node_id, d.kind, d.model_id, d.layers, 1, d.reason, d.quantization, d.revision)
        for i, d in enumerate(drafts)
    ]
    assert plan(nodes, deployed, open_ones).drafts == ()


@settings(max_examples=60, deadline=None)
@given(empty_nodes(stubs=False), models("a", uniform=True) | models("a", uniform=False))
def test_what_first_fit_can_cover_is_covered(nodes: list[Node], model: DeployedModel) -> None:
    having = [node for node in nodes if "a" in node.available_models]
    having = [node for node in nodes if node in having or (node.fetches and having)]
    free = {node.node_id: node.vram_bytes - WORKSPACE_BYTES for node in having}
    fits = True
    for layer in model.manifest.all_layers.layers:
        sizes = {n.node_id: layer_bytes(model, layer, n.quantization) for n in having}
        taker = next((node_id for node_id, size in sizes.items() if size <= free[node_id]), None)
        if taker is None:
            fits = False
            break
        free[taker] -= sizes[taker]
    result = plan(nodes, [model])
    if fits:
        assert result.shortfalls == ()
        assert set(held(obey(nodes, result.drafts), model)) == set(model.manifest.all_layers.layers)


@settings(max_examples=40, deadline=None)
@given(empty_nodes(), models("a", uniform=True), models("b", uniform=True), st.data())
def test_the_rules_hold_while_nodes_come_and_go(
    nodes: list[Node], first: DeployedModel, second: DeployedModel, data: st.DataObject
) -> None:
    deployed = [first, second]
    present: dict[str, Node] = {}
    for _ in range(6):
        changed = data.draw(st.sampled_from(nodes))
        if changed.node_id in present:
            del present[changed.node_id]
        else:
            present[changed.node_id] = changed
        result = plan(present.values(), deployed)
        check_plan(list(present.values()), deployed, result)
        present = {n.node_id: n for n in settle(present.values(), deployed)}


@settings(max_examples=30, deadline=None)
@given(meshes())
def test_undeploying_empties_every_node(mesh: tuple[list[Node], list[DeployedModel]]) -> None:
    nodes, _ = mesh
    ready = [replace(n, shards=tuple(replace(s, state=ShardState.READY) for s in n.shards)) for n in nodes]
    after = obey(ready, plan(ready, []).drafts)
    assert all(n.shards == () for n in after)
    assert plan(after, []).drafts == ()
