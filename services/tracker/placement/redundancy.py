"""Redundancy: what is left after coverage strengthens the layers with the fewest replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshnet.model import LayerRange
from services.tracker.placement.accounts import Account, Costs
from services.tracker.placement.cover import load, pool_of
from services.tracker.placement.shape import Bin
from services.tracker.placement.types import Draft, Policy

ORDINALS = {1: "second", 2: "third"}


def strengthen(all_costs: Sequence[Costs], accounts: Sequence[Account], policy: Policy) -> list[Draft]:
    """Further replicas, weakest layers first, until nothing of a useful size fits. Every layer has a replica before."""
    drafts: list[Draft] = []
    while True:
        found = [choice for costs in all_costs for choice in _choices(costs, accounts, policy)]
        if not found:
            return drafts
        rank, costs, account, layers = min(found, key=lambda choice: (choice[0], choice[1].model.model_id))
        nth = ORDINALS.get(round(rank[0]), "further")
        drafts.append(load(account, costs.model, layers, f"{nth} replica of layers {layers} of {costs.model.model_id}"))


Rank = tuple[float, bool, int, str]
Choice = tuple[Rank, Costs, Account, LayerRange]


def _choices(costs: Costs, accounts: Sequence[Account], policy: Policy) -> Iterator[Choice]:
    model_id = costs.model.model_id
    pool = [account for account in pool_of(accounts, model_id) if not account.node.draining]
    counts = [sum(layer in account.layers(model_id) for account in pool) for layer in range(costs.num_layers)]
    limit = len(pool) if policy.max_replicas is None else min(len(pool), policy.max_replicas)
    shortest = policy.min_piece(costs.num_layers)
    for account in pool:
        held = account.layers(model_id)
        open_layers = {layer for layer, count in enumerate(counts) if count < limit and layer not in held}
        for layers in _windows(costs, account, open_layers, counts):
            if len(layers) >= shortest:
                mean = sum(counts[layer] for layer in layers.layers) / len(layers)
                yield (mean, layers.start != 0, -len(layers), account.node_id), costs, account, layers


def _windows(costs: Costs, account: Account, open_layers: set[int], counts: Sequence[int]) -> Iterator[LayerRange]:
    """From every start the longest window that fits, and the longest with no more replicas than its first layer."""
    taker = Bin(account.node_id, account.free, costs.prefix(account.node.quantization))
    ends = _run_ends(open_layers, dict.fromkeys(open_layers, 0))
    level_ends = _run_ends(open_layers, counts)
    for start in open_layers:
        for end in {
            taker.reach(start, ends[start], costs.num_layers),
            taker.reach(start, level_ends[start], costs.num_layers),
        }:
            if end > start:
                yield LayerRange(start, end)


def _run_ends(layers: set[int], label: Mapping[int, int] | Sequence[int]) -> dict[int, int]:
    """By layer: one past the last layer of the run of equally labelled layers that it is in."""
    ends: dict[int, int] = {}
    for layer in sorted(layers, reverse=True):
        joined = layer + 1 in ends and label[layer + 1] == label[layer]
        ends[layer] = ends[layer + 1] if joined else layer + 1
    return ends
