"""Coverage: a first replica for every layer, in free room or in room that redundant replicas give up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from meshnet.directive import DirectiveKind
from meshnet.model import LayerRange, Quantization, merge_layers
from meshnet.sizes import format_size
from meshnet.topology import DeployedModel
from services.tracker.placement.accounts import Account, Costs
from services.tracker.placement.room import Replicas, choose_drops, freed
from services.tracker.placement.shape import Bin, Piece, arrange, fill
from services.tracker.placement.types import Draft, Policy, Shortfall


def pool_of(accounts: Iterable[Account], model_id: str) -> list[Account]:
    """Nodes that may hold the model: the real ones that have its files; stub nodes only if there is no such."""
    having = [account for account in accounts if model_id in account.node.available_models]
    real = [account for account in having if not account.node.stub]
    return real or having


def cover(
    costs: Costs, accounts: Sequence[Account], stuck: Collection[tuple[str, str]], policy: Policy
) -> tuple[list[Draft], list[Shortfall]]:
    """Fills the gaps of one model; each gap whole or not at all. A model that nobody holds is one gap."""
    pool = pool_of(accounts, costs.model.model_id)
    held = {layer for account in pool for layer in account.layers(costs.model.model_id)}
    runs = merge_layers(set(costs.model.manifest.all_layers.layers) - held)
    return _place(costs, accounts, runs, stuck, policy, "have no node")


def relieve(
    costs: Costs, accounts: Sequence[Account], stuck: Collection[tuple[str, str]], policy: Policy
) -> tuple[list[Draft], list[Shortfall]]:
    """Loads elsewhere what only draining nodes hold. They serve it until that is done, or for good if it cannot be."""
    pool = pool_of(accounts, costs.model.model_id)
    held = {layer for account in pool for layer in account.layers(costs.model.model_id)}
    staying = [account for account in pool if not account.node.draining]
    kept = {layer for account in staying for layer in account.layers(costs.model.model_id)}
    return _place(costs, accounts, merge_layers(held - kept), stuck, policy, "move off a node that is drained")


def _place(
    costs: Costs,
    accounts: Sequence[Account],
    runs: Iterable[LayerRange],
    stuck: Collection[tuple[str, str]],
    policy: Policy,
    why: str,
) -> tuple[list[Draft], list[Shortfall]]:
    pool = [account for account in pool_of(accounts, costs.model.model_id) if not account.node.draining]
    drafts: list[Draft] = []
    shortfalls: list[Shortfall] = []
    for run in runs:
        fitted = _in_free_room(costs, pool, run, policy, why)
        fitted = fitted or _in_made_room(costs, accounts, pool, run, stuck, policy, why)
        if fitted is None:
            shortfalls.append(_shortfall(costs, pool, run))
        else:
            drafts += fitted
    return drafts, shortfalls


def load(account: Account, model: DeployedModel, layers: LayerRange, reason: str) -> Draft:
    """Books the layers and drafts the directive."""
    account.load(model, layers)
    return Draft(
        node_id=account.node_id,
        kind=DirectiveKind.LOAD_SHARD,
        model_id=model.model_id,
        layers=layers,
        quantization=account.node.quantization,
        reason=reason,
        revision=model.manifest.revision,
        kv_tokens=model.kv_tokens,
    )


def drop(account: Account, model_id: str, layers: Iterable[int], reason: str) -> list[Draft]:
    """Takes the layers off the books and drafts one directive a range."""
    ranges = merge_layers(frozenset(layers))
    for gone in ranges:
        account.drop(model_id, gone.layers)
    return [
        Draft(account.node_id, DirectiveKind.DROP_SHARD, model_id, gone, account.node.quantization, reason)
        for gone in ranges
    ]


def _in_free_room(
    costs: Costs, pool: Sequence[Account], run: LayerRange, policy: Policy, why: str
) -> list[Draft] | None:
    room = {account.node_id: account.free for account in pool}
    pieces = _arrange(costs, pool, run, room, policy)
    if pieces is None:
        return None
    by_id = {account.node_id: account for account in pool}
    return [load(by_id[p.node_id], costs.model, p.layers, _reason(costs.model, p.layers, why)) for p in pieces]


def _in_made_room(
    costs: Costs,
    accounts: Sequence[Account],
    pool: Sequence[Account],
    run: LayerRange,
    stuck: Collection[tuple[str, str]],
    policy: Policy,
    why: str,
) -> list[Draft] | None:
    """Drops redundant replicas: all of the run on the one node that must drop least, else spread over several."""
    replicas = Replicas(accounts, stuck)
    choices: list[tuple[int, Account, list[tuple[str, int]]]] = []
    for account in pool:
        rights = replicas.alone(account)
        need = costs.of(run, account.node.quantization) - account.free
        if freed(account, rights) >= need:
            drops = choose_drops(account, rights, need, costs.model.model_id, run)
            choices.append((freed(account, drops), account, drops))
    if choices:
        # The tracker-node's node keeps the first layers if another one can give way.
        _, account, drops = min(choices, key=lambda choice: (choice[1].node.tracker_node, choice[0]))
        return _make_room(account, drops, costs.model, run, why)
    rights_of = replicas.together(sorted(pool, key=lambda a: (a.node.tracker_node, -a.free, a.node_id)))
    room = {a.node_id: a.free + freed(a, rights_of[a.node_id]) for a in pool}
    pieces = _arrange(costs, pool, run, room, policy)
    if pieces is None:
        return None
    drafts: list[Draft] = []
    by_id = {account.node_id: account for account in pool}
    for piece in pieces:
        account = by_id[piece.node_id]
        need = costs.of(piece.layers, account.node.quantization) - account.free
        drops = choose_drops(account, rights_of[piece.node_id], need, costs.model.model_id, piece.layers)
        drafts += _make_room(account, drops, costs.model, piece.layers, why)
    return drafts


def _make_room(
    account: Account, drops: Sequence[tuple[str, int]], model: DeployedModel, layers: LayerRange, why: str
) -> list[Draft]:
    reason = f"makes room for layers {layers} of {model.model_id}; these layers are served elsewhere too"
    drafts: list[Draft] = []
    for model_id in sorted({owner for owner, _ in drops}):
        drafts += drop(account, model_id, (layer for owner, layer in drops if owner == model_id), reason)
    return [*drafts, load(account, model, layers, _reason(model, layers, why))]


def _arrange(
    costs: Costs, pool: Sequence[Account], run: LayerRange, room: Mapping[str, int], policy: Policy
) -> tuple[Piece, ...] | None:
    """The tracker-node's node takes the first layers if it has room for at least one."""
    bins = [_bin(costs, account, run, room[account.node_id]) for account in pool]
    if run.start == 0:
        tracker_nodes = {account.node_id for account in pool if account.node.tracker_node}
        for lead in (b for b in bins if b.node_id in tracker_nodes and b.reach(0, 1, 1) == 1):
            pieces = arrange(bins, run, policy.adjacent_slack, lead)
            if pieces is not None:
                return pieces
    return arrange(bins, run, policy.adjacent_slack)


def _bin(costs: Costs, account: Account, run: LayerRange, room: int) -> Bin:
    held = account.layers(costs.model.model_id)
    return Bin(
        node_id=account.node_id,
        room=room,
        prefix=costs.prefix(account.node.quantization),
        num_held=len(held),
        before=run.start - 1 in held,
        after=run.end in held,
    )


def _reason(model: DeployedModel, layers: LayerRange, why: str) -> str:
    return f"layers {layers} of {model.model_id} {why}"


def _shortfall(costs: Costs, pool: Sequence[Account], run: LayerRange) -> Shortfall:
    """Says what is left over when all free room is filled."""
    model_id = costs.model.model_id
    if not pool:
        size = costs.of(run, Quantization.BFLOAT16)
        return Shortfall(
            model_id,
            run,
            size,
            f"layers {run} of {model_id}: no node here has the files of this model and takes layers",
        )
    roomiest = sorted(pool, key=lambda a: (-a.free, a.node_id))
    placed = fill([_bin(costs, account, run, account.free) for account in roomiest], run)
    end = placed[-1].layers.end if placed else run.start
    left = LayerRange(end, run.end) if end < run.end else run
    free = {account.node_id: account.free for account in pool}
    quantization = {account.node_id: account.node.quantization for account in pool}
    for piece in placed:
        free[piece.node_id] -= costs.of(piece.layers, quantization[piece.node_id])
    best = max(sorted(free), key=lambda node_id: free[node_id])
    size = costs.of(left, quantization[best])
    text = (
        f"layers {left} of {model_id} ({format_size(size)} at {quantization[best]}, KV cache included) fit on no node; "
        f"largest free: {best} with {format_size(max(0, free[best]))}"
    )
    if left.start > run.start:
        text += f" once layers {run.start}-{left.start} are placed; nothing is loaded until all fits"
    return Shortfall(model_id, left, size, text)
