"""The plan of the whole mesh: clear what is not wanted, cover, then strengthen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from meshnet.directive import Directive
from meshnet.topology import DeployedModel, Node
from services.tracker.placement.accounts import Account, Costs, open_accounts
from services.tracker.placement.cover import cover, drop, pool_of, relieve
from services.tracker.placement.redundancy import strengthen
from services.tracker.placement.types import Draft, Plan, Policy, Shortfall


def plan(
    nodes: Iterable[Node],
    models: Iterable[DeployedModel],
    directives: Iterable[Directive] = (),
    *,
    refused: Mapping[str, int] | None = None,
    stuck: Collection[tuple[str, str]] = frozenset(),
    policy: Policy | None = None,
) -> Plan:
    """What to order, given the nodes with what they report, the deployed models and the open directives.

    `directives` are in the order of issue. `refused`: bytes that a node can hold at most, learned from failed loads.
    `stuck`: (node id, model id) whose drops have failed and are not ordered again. The plan of a settled mesh is empty.
    """
    policy = policy or Policy()
    ranked = sorted(models, key=lambda model: (-model.priority, model.model_id))
    accounts = open_accounts(nodes, ranked, directives, refused, policy)
    all_costs = [Costs(model) for model in ranked]
    drafts = _clear(accounts, ranked, stuck) + _empty(accounts, ranked, stuck)
    shortfalls: list[Shortfall] = []
    for costs in all_costs:
        placed, missing = cover(costs, accounts, stuck, policy)
        drafts += placed
        shortfalls += missing
    for costs in all_costs:
        placed, missing = relieve(costs, accounts, stuck, policy)
        drafts += placed
        shortfalls += missing
    if not shortfalls:
        drafts += strengthen(all_costs, accounts, policy)
    return Plan(tuple(drafts), tuple(shortfalls))


def _clear(
    accounts: Sequence[Account], models: Sequence[DeployedModel], stuck: Collection[tuple[str, str]]
) -> list[Draft]:
    """Drops what no deployed model needs: other models, other revisions, stubs once real nodes serve everything."""
    deployed = {model.model_id: model for model in models}
    replaced = {model.model_id for model in models if _is_served_by_real_nodes(accounts, model)}
    drafts: list[Draft] = []
    for account in accounts:
        for model_id in sorted(account.held):
            if (account.node_id, model_id) in stuck or not account.layers(model_id):
                continue
            if model_id not in deployed:
                reason = f"{model_id} is not deployed"
            elif model_id not in account.node.available_models:
                reason = f"the node has another revision of {model_id} than the mesh serves"
            elif account.node.stub and model_id in replaced:
                reason = f"real nodes serve all of {model_id}"
            else:
                continue
            drafts += drop(account, model_id, tuple(account.layers(model_id)), reason)
    return drafts


def _empty(
    accounts: Sequence[Account], models: Sequence[DeployedModel], stuck: Collection[tuple[str, str]]
) -> list[Draft]:
    """Drops from draining nodes what others serve by now."""
    served = {
        (account.node.stub, model_id, layer)
        for account in accounts
        if not account.closed
        for model_id, layers in account.ready.items()
        for layer in layers
    }
    drafts: list[Draft] = []
    for account in accounts:
        for model in models if account.node.draining and account.node.alive else ():
            model_id = model.model_id
            layers = [i for i in account.layers(model_id) if (account.node.stub, model_id, i) in served]
            if (account.node_id, model_id) not in stuck:
                drafts += drop(account, model_id, layers, "the node is drained; these layers are served elsewhere")
    return drafts


def _is_served_by_real_nodes(accounts: Sequence[Account], model: DeployedModel) -> bool:
    pool = [account for account in pool_of(accounts, model.model_id) if not account.closed and not account.node.stub]
    ready = {layer for account in pool for layer in account.ready.get(model.model_id, ())}
    return ready.issuperset(model.manifest.all_layers.layers)
